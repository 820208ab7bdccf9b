"""The error that becomes a response of status 4xx or 503."""


class RequestError(Exception):
    """A request is not answered; the client gets a status, and one line with what to do."""

    def __init__(self, message: str, *, status: int = 400):
        super().__init__(message)
        self.status = status
