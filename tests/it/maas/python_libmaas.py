"""Drives a provider with PyPI's client of MAAS: python other_client.py BASE_URL API_KEY SYSTEM_ID HOSTNAME."""

import asyncio
import base64
import json
import sys

from maas.client.bones import CallError, SessionAPI
from maas.client.utils.creds import Credentials


def status_of(call, **arguments):
    """The status of a call that is refused."""
    try:
        call(**arguments)
    except CallError as refused:
        return refused.status
    raise AssertionError("the call is not refused")


def main(base, api_key, system_id, hostname):
    url = base + "/api/2.0/"
    session = SessionAPI.fromURL(url, credentials=Credentials.parse(api_key))
    consumer, token, _ = api_key.split(":")
    stranger = SessionAPI.fromURL(url, credentials=Credentials(consumer, token, "another secret"))
    user_data = base64.b64encode(b"#!/bin/sh\necho " + b"x" * 10_000 + b"\n").decode()
    seen = {
        "user": session.Users.whoami()["username"],
        "stranger": status_of(stranger.Users.whoami),
        "listed": [machine["system_id"] for machine in session.Machines.read(hostname=[hostname])],
        "not_allocated": status_of(session.Machine.deploy, system_id=system_id, user_data=user_data),
        "allocated": session.Machines.allocate(system_id=system_id)["status_name"],
        "taken": status_of(session.Machines.allocate, system_id=system_id),
        "deployed": session.Machine.deploy(system_id=system_id, user_data=user_data)["status_name"],
        "again": status_of(session.Machine.deploy, system_id=system_id, user_data=user_data),
        "read": session.Machine.read(system_id=system_id)["owner"],
        "unknown": status_of(session.Machine.read, system_id="none"),
        "released": session.Machine.release(system_id=system_id, erase=True)["status_name"],
        "broken": session.Machine.mark_broken(system_id=system_id, comment="a test")["status_name"],
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    # The client asks for the loop of the thread, which Python makes no more by itself.
    asyncio.set_event_loop(asyncio.new_event_loop())
    main(*sys.argv[1:])
