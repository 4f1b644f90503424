# For GPU machines: vLLM's own image, mismatch on top. Not built or run by this project's CI.
FROM vllm/vllm-openai:v0.32.0
# The trainer compiles small kernels with Triton. Versions are those of the image's distribution.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc python3-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/mismatch
COPY . .
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir ".[datasets]"
WORKDIR /work
ENTRYPOINT ["mismatch"]
CMD ["--help"]
