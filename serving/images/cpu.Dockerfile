# Runs and verifies bundles on a CPU, from a checkout:
#   docker build --file serving/images/cpu.Dockerfile --tag attnforge .
#   docker run --rm --volume ./my.bundle:/app/my.bundle:ro attnforge verify my.bundle
FROM python:3.12-slim AS wheel
WORKDIR /app
COPY . source
RUN pip wheel --quiet --no-deps --wheel-dir wheels ./source

FROM python:3.12-slim
WORKDIR /app
COPY serving/images/requirements.txt requirements.txt
RUN pip install --quiet --no-cache-dir --requirement requirements.txt
COPY --from=wheel /app/wheels wheels
RUN pip install --quiet --no-cache-dir --no-deps wheels/*.whl && rm -r wheels
USER 1000:1000
ENTRYPOINT ["attnforge"]
CMD ["doctor"]
