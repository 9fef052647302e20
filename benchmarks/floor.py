"""The least a Python program can do with a hint: one claim call on a warm connection, one spawn. No gates in Python, no
supervision, no net. `wake_latency.py` runs it beside the daemon, on a gateway of its own."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid

from websockets.sync.client import connect

url, key, topic, instance, executable = sys.argv[1:6]
where = urllib.parse.urlsplit(url)
rest = http.client.HTTPConnection(where.hostname or "", where.port)
headers = {"apikey": key, "Authorization": f"Bearer {key}", "Content-Type": "application/json"}
socket = connect(
    f"{url.replace('http', 'ws', 1)}/realtime/v1/websocket?apikey={key}&vsn=1.0.0", compression=None, proxy=None
)


def send(subject: str, event: str, payload: object) -> None:
    socket.send(json.dumps({"topic": subject, "event": event, "payload": payload, "ref": "1", "join_ref": "1"}))


def beat() -> None:
    while True:
        time.sleep(20)
        send("phoenix", "heartbeat", {})


def claim(agent_id: str, item_id: str) -> dict[str, object]:
    claims = [{"agent_id": agent_id, "path": "event", "item_ids": [item_id]}]
    body = json.dumps({"p_instance_id": instance, "p_claims": claims, "p_request": str(uuid.uuid4())})
    rest.request("POST", "/rest/v1/rpc/claim_wakes", body, headers)
    [verdict] = json.loads(rest.getresponse().read())
    return verdict


broadcast = {"ack": False, "self": False, "replication_ready": True}
send(f"realtime:{topic}", "phx_join", {"config": {"broadcast": broadcast, "private": True}})
threading.Thread(target=beat, daemon=True).start()
children: list[subprocess.Popen[bytes]] = []
for text in socket:
    frame = json.loads(text)
    if frame["event"] == "system":
        print("ready", flush=True)
    if frame["event"] != "broadcast" or frame["payload"]["event"] != "inbox":
        continue
    hint = frame["payload"]["payload"]
    verdict = claim(hint["agent_id"], hint["item_id"])
    if verdict["granted"]:
        argv = [
            executable,
            "agent",
            "--agent",
            f"{verdict['workspace_slug']}/{verdict['agent_slug']}",
            "--message",
            "x",
        ]
        children = [child for child in children if child.poll() is None]
        children.append(
            subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(os.environ),
            )
        )
