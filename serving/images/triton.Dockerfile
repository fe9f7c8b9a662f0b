# Serves models of `attnforge package --for triton` on Triton's Python backend, from a checkout; TRITON is an image of
# Triton that you have:
#   docker build --file serving/images/triton.Dockerfile --build-arg TRITON=… --tag attnforge-triton .
#   docker run --rm --publish 8000:8000 --volume ./repository:/app/repository:ro attnforge-triton
ARG TRITON
FROM python:3.12-slim AS wheel
WORKDIR /app
COPY . source
RUN pip wheel --quiet --no-deps --wheel-dir wheels ./source

FROM ${TRITON}
WORKDIR /app
COPY serving/images/requirements.txt requirements.txt
RUN pip install --quiet --no-cache-dir --requirement requirements.txt
COPY --from=wheel /app/wheels wheels
RUN pip install --quiet --no-cache-dir --no-deps wheels/*.whl && rm -r wheels
USER 1000:1000
CMD ["tritonserver", "--model-repository", "repository"]
