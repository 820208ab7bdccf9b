# An image that trains: docker build -t IMAGE .  (for NVIDIA GPUs: --build-arg EXTRAS=[gpu])
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ARG EXTRAS=""
RUN python -m venv /opt/tfdist
COPY . /source
RUN /opt/tfdist/bin/pip install --no-cache-dir "/source${EXTRAS}"

FROM python:${PYTHON}-slim
COPY --from=build /opt/tfdist /opt/tfdist
ENV PATH=/opt/tfdist/bin:${PATH} PYTHONUNBUFFERED=1
# As the job files have it: runAsUser, fsGroup.
RUN useradd --create-home --uid 1000 tfdist
USER 1000
WORKDIR /home/tfdist
ENTRYPOINT ["python", "-m", "tfdist.train"]
