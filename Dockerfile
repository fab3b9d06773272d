# docker build -t boundby .                                   for a CPU
# docker build -t boundby:cuda --build-arg DEVICE=cuda .      for an NVIDIA GPU; torch brings its CUDA libraries
# docker run --rm -v "$PWD:/workspace" --user "$(id -u):$(id -g)" boundby run model.name=./my-model dataset.file=texts.csv
ARG PYTHON=3.12.12-slim-bookworm

FROM python:${PYTHON} AS wheel
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir "$(grep '^hatchling==' setup/requirements-test.txt)" && hatchling build -t wheel -d /wheel

FROM python:${PYTHON} AS environment
ARG DEVICE=cpu
RUN python -m venv /opt/boundby
ENV PATH=/opt/boundby/bin:$PATH
COPY setup/requirements-torch.txt setup/locks/core.txt /setup/
RUN case "$DEVICE" in \
        cpu) pip install --no-cache-dir -r /setup/requirements-torch.txt --index-url https://download.pytorch.org/whl/cpu ;; \
        cuda) pip install --no-cache-dir -r /setup/requirements-torch.txt ;; \
        *) echo "DEVICE is '$DEVICE'; give cpu or cuda" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir --require-hashes --no-deps -r /setup/core.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir --no-deps /wheel/*.whl

FROM python:${PYTHON}
# torch.compile calls a compiler. Debian keeps one version of a package in a release, so there is none to pin.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --no-create-home boundby && install -d -o boundby /workspace
COPY --from=environment /opt/boundby /opt/boundby
# USER and HOME hold for any number given to --user, which has no name and no folder in the image.
ENV PATH=/opt/boundby/bin:$PATH USER=boundby HOME=/workspace HF_HOME=/workspace/.cache/huggingface
USER 1000
WORKDIR /workspace
ENTRYPOINT ["boundby"]
CMD ["--help"]
