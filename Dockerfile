# docker build -t speedrun .                        for NVIDIA GPUs; --build-arg KIND=cpu: for none, and much smaller
# docker run --gpus all --shm-size 8g -v "$PWD/data/shards:/speedrun/data/shards" \
#            -v "$PWD/records/runs:/speedrun/records/runs" speedrun [doctor | --name value ...]
FROM python:3.12-slim
ARG KIND=cuda
# Triton compiles its launchers with a C compiler. The log names the commit, for which it asks git.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev git && rm -rf /var/lib/apt/lists/*
WORKDIR /speedrun
COPY requirements.txt run.sh ./
RUN PIP_NO_CACHE_DIR=1 ./run.sh install "$KIND"
COPY . .
# What is installed is used as it is.
ENV PYTHON=.venv/bin/python
ENTRYPOINT ["./run.sh"]
