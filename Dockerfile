# Two images from one file:
#   docker build -t openclaw-dispatcher .                            the daemon; openclaw is expected from the gateway image
#   docker build -t openclaw-dispatcher --target with-openclaw .     with its own openclaw (Node), to run beside a gateway
# Neither carries a secret: everything comes from the environment or a mounted $OPENCLAW_HOME/secrets/gateway.env.
ARG PYTHON_IMAGE=python:3.13.9-slim-trixie
ARG NODE_IMAGE=node:24.16.0-trixie-slim

# ---- build: the tested set of packages, and this package, in one virtual environment
FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python -m venv /opt/dispatcher
COPY pyproject.toml README.md LICENSE ./
COPY requirements/ requirements/
COPY supabase/migrations/ supabase/migrations/
COPY scripts/ scripts/
COPY dispatcher/ dispatcher/
RUN /opt/dispatcher/bin/pip install --constraint requirements/constraints.txt ".[migrate]"

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
