"""When and how workers average the weights that each of them trains by itself."""

from dataclasses import dataclass

from tfdist.errors import TfdistError
from tfdist.options import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class Averaging(OptionGroup):
    """The averaging of local SGD; a plain mean with a learning rate of 1 and no momentum."""

    sync_every: int = option(8, "steps between two averagings of the weights", minimum=1)
    average_optimizer: bool = option(True, "average the optimizer's state as well")
    outer_learning_rate: float = option(1.0, "learning rate of the averaging step", above=0)
    outer_momentum: float = option(0.0, "momentum of the averaging step; 0: none", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outer_momentum >= 1:
            raise TfdistError(f"`outer_momentum={self.outer_momentum}` is not below 1. Try 0.5.")
