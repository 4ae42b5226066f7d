# Ramify on CPUs: `docker build -t ramify .`, then `docker run -p 127.0.0.1:8000:8000 -v ramify:/cache ramify`.
# PIP_ARGS hands options to pip: with --extra-index-url it takes the CPU build of PyTorch, which is far smaller.
ARG PYTHON=3.12

# The wheel, with kernels for AVX2 and AVX-512: the image itself needs no compiler.
FROM python:${PYTHON}-slim-bookworm AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY ramify ramify
ARG PIP_ARGS=""
RUN pip wheel $PIP_ARGS --no-deps --wheel-dir /wheels --config-settings=--build-option=--kernels .

FROM python:${PYTHON}-slim-bookworm
ARG PIP_ARGS=""
COPY constraints.txt /constraints.txt
COPY --from=wheel /wheels /wheels
RUN pip install $PIP_ARGS --no-cache-dir -c /constraints.txt "$(echo /wheels/*.whl)[server]" && rm -r /wheels
RUN useradd --create-home --uid 1000 ramify && mkdir /cache && chown ramify /cache
USER ramify
# Models that are fetched stay here.
ENV RAMIFY_CACHE=/cache/ramify HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=5m --interval=30s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["ramify"]
CMD ["serve", "--host", "0.0.0.0"]
