"""A certificate that signs itself."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def write_certificate(folder: Path, host: str) -> tuple[Path, Path]:
    """Write a certificate for a name, and its key; return both files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=2)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, until)
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    certificate, private = folder / "fullchain.pem", folder / "privkey.pem"
    pem = serialization.Encoding.PEM
    certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    plain = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return certificate, private
