"""The hosts and addresses that webhooks may reach."""

import pytest

from oraculo.core.webhook_rules import LOOPBACK, WebhookRules, allow_fault

REFUSED = {
    "loopback": """127.0.0.1 127.9.9.9 ::1 0.0.0.0 :: 0 127.1 127.0.1 0x7f.1 0x7f000001 017700000001 0177.0.0.1
        2130706433 127.0.0.1. [::1] ::ffff:127.0.0.1 ::ffff:7f00:1 64:ff9b::7f00:1 2002:7f00:1:: %31%32%37.0.0.1
        127。0。0。1 １２７.0.0.1""",
    "link-local": "169.254.169.254 2852039166 0xA9FEA9FE fe80::1 fe80::1%eth0 ::ffff:169.254.169.254",
    "private": "10.0.0.1 172.31.255.255 192.168.1.1 192.168.257 100.64.0.1 fc00::1 fd00:ec2::254 fec0::1",
    "multicast": "224.0.0.1 239.255.255.255 ff02::1",
    "reserved": """192.0.0.192 192.0.2.1 192.88.99.1 198.18.0.1 203.0.113.7 240.0.0.1 255.255.255.255 2001:db8::1
        2002:c000:c0:: 3fff::1 ::7f00:1 4000::1""",
}
ALLOWED = (
    "8.8.8.8 172.32.0.1 100.128.0.1 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808 hooks.example local.host 1.2.3.4.5"
)


@pytest.mark.parametrize("host", [host for hosts in REFUSED.values() for host in hosts.split()])
def test_an_address_that_is_not_global_is_refused_however_it_is_spelled(host: str) -> None:
    fault = WebhookRules().host_fault(host)
    assert fault is not None
    assert "ORACULO_WEBHOOK_ALLOW" in fault


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "localhost.", "a.localhost", "ip6-loopback"])
def test_names_of_this_machine_are_refused(host: str) -> None:
    assert WebhookRules().host_fault(host) is not None
    assert WebhookRules(["127.0.0.0/8"]).host_fault(host) is None
    assert WebhookRules(["0.0.0.0/0"]).host_fault(host) is None
    assert WebhookRules(["10.0.0.0/8"]).host_fault(host) is not None


@pytest.mark.parametrize("host", ALLOWED.split())
def test_global_addresses_and_names_are_allowed(host: str) -> None:
    assert WebhookRules().host_fault(host) is None


def test_a_name_is_judged_by_each_of_its_addresses() -> None:
    targets = WebhookRules(["hooks.intern", "10.1.0.0/16", "fd00::7"])
    assert targets.address_fault("evil.example", "127.0.0.1") is not None
    assert targets.address_fault("evil.example", "10.2.0.1") is not None
    assert targets.address_fault("evil.example", "fe80::1%eth0") is not None
    for host, address in (
        ("evil.example", "10.1.2.3"),
        ("evil.example", "fd00::7"),
        ("evil.example", "::ffff:10.1.2.3"),
        ("HOOKS.intern.", "127.0.0.1"),
        ("evil.example", "8.8.8.8"),
    ):
        assert targets.address_fault(host, address) is None


def test_what_dev_allows_is_this_machine_and_no_more() -> None:
    targets = WebhookRules(LOOPBACK)
    assert [targets.host_fault(host) for host in ("localhost", "127.0.0.9", "[::1]")] == [None] * 3
    assert None not in [targets.host_fault(host) for host in ("10.0.0.1", "169.254.169.254", "0.0.0.0")]


@pytest.mark.parametrize("entry", ["http://a", "a:80", "10.0.0.0/99", "127.1", "0x7f000001", "*.a", "", "a b"])
def test_an_entry_that_allows_nothing_is_a_fault(entry: str) -> None:
    assert repr(entry) in (allow_fault(["hooks.intern", entry]) or "")


def test_hosts_addresses_and_networks_are_entries() -> None:
    assert allow_fault(["hooks.intern", "hook_1", "10.0.0.7", "10.1.2.3/16", "::1", "[::1]", "fd00::/8"]) is None
