# Two images from one file:
#   docker build -t openclaw-dispatcher .                            the daemon; openclaw is expected from the gateway image
#   docker build -t openclaw-dispatcher --target with-openclaw .     with its own openclaw (Node), to run beside a gateway
# Neither carries a secret: everything comes from the environment or a mounted $OPENCLAW_HOME/secrets/gateway.env.
# The digests are those of the index over all platforms. To renew one: docker buildx imagetools inspect python:3.13.14-slim-trixie
ARG PYTHON_IMAGE=python:3.13.14-slim-trixie@sha256:9662417aace5ae7b8e2609cce472b72a8958e134ba372808abe9cc1a0c0125e6
ARG NODE_IMAGE=node:24.20.0-trixie-slim@sha256:50c3b2f6988dfc307b86e5301d69611af31f4789bdf232863b07d3b02fe55ae0

# ---- build: the tested set of packages, and this package, in one virtual environment
FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements/ requirements/
RUN python -m venv /opt/build && /opt/build/bin/pip install --require-hashes --requirement requirements/build.txt
RUN python -m venv /opt/dispatcher && /opt/dispatcher/bin/pip install --require-hashes --requirement requirements/daemon.txt
COPY pyproject.toml README.md LICENSE ./
COPY supabase/migrations/ supabase/migrations/
COPY scripts/ scripts/
COPY dispatcher/ dispatcher/
RUN /opt/build/bin/python -m hatchling build --target wheel --directory /dist \
 && /opt/dispatcher/bin/pip install --no-deps --no-index /dist/*.whl

# ---- runtime: no compiler, no pip cache, no root
FROM ${PYTHON_IMAGE} AS runtime
RUN apt-get update \
 && apt-get install --yes --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/*
# The uid of `node` in the gateway image: both must read and write the same OpenClaw home.
ARG UID=1000
RUN useradd --uid ${UID} --create-home --shell /usr/sbin/nologin dispatcher
COPY --from=build /opt/dispatcher /opt/dispatcher
ENV PATH=/opt/dispatcher/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OPENCLAW_HOME=/home/dispatcher/.openclaw
USER dispatcher
WORKDIR /home/dispatcher
STOPSIGNAL SIGTERM
# Whether the process lives and its loops turn: an outage of Supabase is no reason to restart it.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 CMD ["dispatcher", "health"]
# tini reaps what woken agents leave behind, and hands signals on.
ENTRYPOINT ["tini", "--", "dispatcher"]
CMD ["run"]

# ---- openclaw from npm, for the image that brings its own
FROM ${NODE_IMAGE} AS openclaw
ARG OPENCLAW_VERSION=2026.9.6
RUN npm install --global --no-audit --no-fund openclaw@${OPENCLAW_VERSION}

FROM runtime AS with-openclaw
COPY --from=openclaw /usr/local/bin/node /usr/local/bin/node
COPY --from=openclaw /usr/local/lib/node_modules/openclaw /usr/local/lib/node_modules/openclaw
USER root
RUN ln -s ../lib/node_modules/openclaw/openclaw.mjs /usr/local/bin/openclaw
USER dispatcher

# ---- the default
FROM runtime AS dispatcher
