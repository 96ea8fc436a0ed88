# A data owner's node. Not root, nothing written but /state; images are mounted read-only at /data, see containers/compose.yaml.
FROM python:3.11-slim
ARG EXTRAS=flower,secure,privacy,lora
RUN useradd --create-home --uid 10001 fedgraft && mkdir /state /data && chown fedgraft /state
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"
USER fedgraft
ENV HOME=/state FEDGRAFT_CACHE=/state/cache PYTHONDONTWRITEBYTECODE=1
WORKDIR /state
# Healthy while the process that asks the server for orders lives.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["python", "-c", "import pathlib,sys; sys.exit(0 if any(b'fedgraft.deploy.node_loop\\0--superlink' in p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')) else 1)"]
ENTRYPOINT ["fedgraft", "deploy"]
CMD ["node", "--help"]
