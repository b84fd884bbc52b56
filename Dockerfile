# What the README's two commands need:
#     docker build --tag firecaffe .
#     docker run --rm --shm-size 1g firecaffe make demo
#     docker run --rm --shm-size 1g firecaffe make test
FROM python:3.11-slim-bookworm

# g++ is for train.compile, git for the tests of the repository.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*

# Tests that emulate hosts need root and a network of their own; without root they are skipped.
RUN useradd --create-home firecaffe && install -d -o firecaffe /home/firecaffe/checkout
USER firecaffe
WORKDIR /home/firecaffe/checkout
COPY --chown=firecaffe . .
RUN make install
CMD ["make", "demo"]
