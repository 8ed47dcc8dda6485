# A server in a container: conversations, models and tokens live under /data.
#
#   docker build --tag chatserve .
#
# pip takes torch from whatever index it is told to use; for a machine without a GPU, --build-arg PIP_EXTRA_INDEX_URL=…
# with PyTorch's index of CPU builds saves some gigabytes.
FROM python:3.12-slim

ARG PIP_EXTRA_INDEX_URL
ENV PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY chatserve chatserve
COPY kernels kernels
COPY web web
RUN pip install --no-cache-dir --editable . \
    && useradd --system --uid 10001 --create-home chatserve \
    && install --directory --owner chatserve --group chatserve --mode 0700 /data

USER chatserve
ENV CHATSERVE_HOST=0.0.0.0 \
    CHATSERVE_PORT=8000 \
    CHATSERVE_DATA_DIR=/data/sessions \
    CHATSERVE_CACHE_DIR=/data/models \
    CHATSERVE_TOKENS_FILE=/data/tokens
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM

# The first start fetches the model.
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/readyz', timeout=2)"]

ENTRYPOINT ["chatserve"]
CMD ["serve"]
