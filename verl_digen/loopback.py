# SPDX-License-Identifier: Apache-2.0
"""Addresses that only this machine reaches."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """True for a loopback address; a name other than localhost may resolve to anything."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
