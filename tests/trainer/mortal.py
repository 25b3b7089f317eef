# SPDX-License-Identifier: Apache-2.0
"""Processes of replicas that die. In a file of their own, so that they start without torch."""

import os


class Process:
    """A server, or a worker of the checkpoint engine."""

    def __init__(self):
        self.version = 0

    def take(self, version):
        self.version = version

    def version_now(self):
        return self.version

    def refuse(self, version):
        if self.version == version:
            raise ValueError(f"version {version} is refused")

    def process_id(self):
        return os.getpid()

    def check_health(self):
        return {
            "version": self.version,
            "received_version": self.version,
            "prompt_cache": {"hits": 3, "misses": 1},
            "last_update": {"load_s": 1.0, "drain_s": 2.0},
        }

    def die(self):
        os._exit(1)


class Balancer:
    """verl's load balancer."""

    def __init__(self):
        self.removed = []

    def remove_servers(self, addresses):
        self.removed += addresses

    def forget(self):
        self.removed = []

    def all_removed(self):
        return self.removed
