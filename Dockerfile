# An image that trains: docker build -t IMAGE .  (for NVIDIA GPUs: --build-arg EXTRAS=[gpu]; for TPUs: EXTRAS=[tpu])
ARG PYTHON=3.13.9-slim-trixie

FROM python:${PYTHON} AS build
ARG EXTRAS=""
RUN python -m venv /opt/tfdist
# The dependencies: a layer that stays when only the code changes.
WORKDIR /source
COPY setup.cfg pyproject.toml ./
RUN mkdir tfdist && echo '__version__ = "0"' > tfdist/__init__.py && touch README.md LICENSE \
 && /opt/tfdist/bin/pip install --no-cache-dir ".${EXTRAS}" \
 && rm -rf tfdist README.md LICENSE build *.egg-info
# The package for TPUs replaces files of TensorFlow, on which tfdist depends.
RUN case "${EXTRAS}" in *tpu*) \
    /opt/tfdist/bin/pip install --no-cache-dir --no-deps --force-reinstall \
      "$(/opt/tfdist/bin/pip freeze | grep -i '^tensorflow.tpu==')" ;; esac
COPY . .
RUN /opt/tfdist/bin/pip install --no-cache-dir --no-deps --force-reinstall .

FROM python:${PYTHON}
COPY --from=build /opt/tfdist /opt/tfdist
ENV PATH=/opt/tfdist/bin:${PATH} PYTHONUNBUFFERED=1
# As the job files have it: runAsUser, fsGroup.
RUN useradd --create-home --uid 1000 tfdist
USER 1000
WORKDIR /home/tfdist
ENTRYPOINT ["python", "-m", "tfdist.train"]
