"""A certificate authority of the tests' own, and a certificate for localhost."""

from pathlib import Path
from typing import NamedTuple

import trustme


class Certificates(NamedTuple):
    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    made = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    authority.cert_pem.write_to_path(made.authority)
    issued.cert_chain_pems[0].write_to_path(made.certificate)
    issued.private_key_pem.write_to_path(made.key)
    return made
