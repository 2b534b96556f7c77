"""The names and addresses by which only this machine reaches itself."""

from ipaddress import IPv6Address, ip_address


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine: `localhost`, a name below it, or an address such as 127.0.0.1 or ::1."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
