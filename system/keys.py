"""Private key files, read only if nobody else may read them; and signatures.

That rule applies to the keys of silos, of operators and of the coordinator. A group may read a key
if that group is this account's only access to it, as in a pod.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

ENVIRONMENT, ANY = "COTERIE_KEY_MODE", "any"
"""Variable, and its value that permits keys readable by other accounts."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO


class KeyFileError(ValueError):
    """A private key cannot be used. The text has the reason and a remedy."""


def read_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key that is not protected by a password.

    Raises:
        OSError: it is missing, or this account may not read it.
        KeyFileError: it is damaged, or others may read it.
    """
    about, content = file.stat(), file.read_bytes()
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (TypeError, ValueError) as error:  # TypeError: it has a password
        raise KeyFileError(f"{file} cannot be read: {error}.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KeyFileError(f"{file} is not a key of the type that coterie creates.")
    if about.st_mode & OTHERS and not _allowed(about):
        raise KeyFileError(_refusal(file, about))
    return key


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def verifies(
    key: object, signature: bytes, content: bytes, hashed: hashes.HashAlgorithm | None = None
) -> bool:
    """Return whether a public key made a signature (ECDSA, by default with SHA-384)."""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        return False
    try:
        key.verify(signature, content, ec.ECDSA(hashed or hashes.SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return True


def remark(file: Path) -> str:
    """Return a warning on a usable key; empty if only its owner may read it."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return ""
    if not mode & OTHERS:
        return ""
    if mode & stat.S_IRWXO:
        return f"every account on this machine may read {file} ({ENVIRONMENT}={ANY} allows it)."
    return f"the group of {file} may read it, and this process is in that group."


def _allowed(about: os.stat_result) -> bool:
    """Return whether a key that others may read can still be used.

    A Secret belongs to root and is read by a group; fsGroup gives every file of a volume to one;
    random user ids, which no account has, share their files by group 0.
    """
    if os.environ.get(ENVIRONMENT) == ANY:
        return True
    if about.st_mode & stat.S_IRWXO or about.st_gid not in {os.getegid(), *os.getgroups()}:
        return False
    of_root = about.st_uid == 0 != os.geteuid()
    return of_root or "KUBERNETES_SERVICE_HOST" in os.environ or not _has_account()


def _has_account() -> bool:
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return True


def _refusal(file: Path, about: os.stat_result) -> str:
    instead = f"If no other account uses this machine, {ENVIRONMENT}={ANY} allows it."
    wrong = f"{file} may be read by accounts other than its owner"
    failure = _tightened(file, about)
    if failure == 0:
        return f"{wrong}. Run: chmod 600 {file}"
    if failure == errno.EROFS:
        return (
            f"{wrong}, and is mounted read-only. Change its mode where the mount is defined: "
            f"defaultMode 0400 for a Kubernetes Secret. {instead}"
        )
    if about.st_uid != os.geteuid():
        return (
            f"{wrong}, and belongs to the account with the id {about.st_uid}. Have that account "
            f"run chmod 600, or give the file to the account that runs coterie. {instead}"
        )
    return (
        f"{wrong}: its file system does not store modes, so chmod has no effect. Move the "
        "folder to a local disk that stores them (in WSL not below /mnt/c; not a Windows share "
        "or USB stick), or mount it for this account only (uid=ID,umask=077 for vfat, "
        f"uid=ID,file_mode=0600,dir_mode=0700 for cifs). {instead}"
    )


def _tightened(file: Path, about: os.stat_result) -> int:
    """Check whether ``chmod 600`` would help, and undo it; return 0 or the error's number."""
    try:
        file.chmod(0o600)
        if file.stat().st_mode & OTHERS:
            return errno.ENOTSUP
        file.chmod(stat.S_IMODE(about.st_mode))
    except OSError as error:
        return error.errno or errno.ENOTSUP
    return 0
