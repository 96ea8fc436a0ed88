# The coordinator's server. Not root, nothing written but /state, which holds the federation's folder and its runs.
FROM python:3.11-slim
ARG EXTRAS=flower,secure,privacy,lora
RUN useradd --create-home --uid 10001 fedgraft && mkdir /state && chown fedgraft /state
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"
USER fedgraft
ENV HOME=/state FEDGRAFT_CACHE=/state/cache PYTHONDONTWRITEBYTECODE=1
WORKDIR /state
EXPOSE 9400
# Healthy while the port takes connections.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["python", "-c", "import socket; socket.create_connection(('127.0.0.1', 9400), 5).close()"]
ENTRYPOINT ["fedgraft", "deploy"]
CMD ["server", "fed", "--port", "9400"]
