"""Debian packages without touching the host: a private apt, and the mirror and keys to use with it.

Owns a folder with its own sources, lists, cache, package archive and an EMPTY dpkg status:

    <folder>/apt.conf            read first by way of APT_CONFIG; replaces the host's apt.conf and its parts
    <folder>/sources.d/*.sources the wanted suites, each signed by the host's archive keyring
    <folder>/lists/ archives/    what apt fetched
    <folder>/status              always empty, so a closure is complete and never leans on the host's packages

Invariants: the host's apt and dpkg state is only read (sources, network settings, credentials); signatures stay on;
no mirror is built in, it is taken from the host's own sources.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.core.errors import HostNotReady, Internal, InvalidInput, NotFound, Unavailable
from agentenv.host.asset_cache import file_lock
from agentenv.host.command import Progress, no_progress, run_command

DEBIAN_RELEASES = ("buster", "bullseye", "bookworm", "trixie", "forky", "sid", "oldoldstable", "oldstable", "stable", "testing", "unstable")
"""Suite names that only Debian itself uses: how its archive is told from third-party ones."""

ARCHIVE_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ARCHITECTURE = "amd64"

LISTS_FRESH_S = 3600.0
"""How long fetched lists serve before they are fetched again; a package that has moved forces it earlier."""
UPDATE_TIMEOUT_S = 600.0
DOWNLOAD_TIMEOUT_S = 3600.0
QUERY_TIMEOUT_S = 120.0
UNPACK_TIMEOUT_S = 300.0

_INHERITED_SETTINGS = re.compile(
    r"^Acquire::(?:https?::|ftp::|Retries\b|ForceIPv[46]\b|Check-Valid-Until\b|Check-Date\b|Max-FutureTime\b|Queue-Mode\b)"
)
"""Settings of the host about reaching the mirror. Hooks, pins and folders of the host must not come along."""

_PACKAGE_NAME = re.compile(r"^[a-z0-9][a-z0-9+.-]+(?:[=/][A-Za-z0-9.+:~-]+)?$")
_SUITE_NAME = re.compile(r"^[a-z][a-z0-9.-]*(?:/[a-z-]+)?$")


@dataclass(frozen=True)
class AptSource:
    """One `deb` line or stanza of the host: an archive address, its suites and the key it is checked with."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""


@dataclass(frozen=True)
class DebianMirror:
    """Where Debian packages come from. `security_uri` is empty when the host uses no security archive."""

    uri: str
    security_uri: str
    signed_by: str
    """A keyring file, or the text of an armored key block."""


@dataclass(frozen=True)
class DebFile:
    """A package file that apt would fetch."""

    name: str
    size_bytes: int


def parse_source_lines(text: str) -> list[AptSource]:
    """Entries of a one-line-style `.list` file (sources.list(5)); `deb-src` lines are left out."""
    found = []
    for line in text.splitlines():
        match = re.match(r"^\s*deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if not match:
            continue
        options, uri, suite, components = match.groups()
        signed_by = re.search(r"(?:^|\s)signed-by=(\S+)", options or "", re.IGNORECASE)
        found.append(AptSource(uri, (suite,), tuple(components.split()), signed_by.group(1) if signed_by else ""))
    return found


def parse_source_stanzas(text: str) -> list[AptSource]:
    """Entries of a deb822-style `.sources` file (sources.list(5)); disabled and source-only stanzas are left out."""
    found = []
    uncommented = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n\s*\n", uncommented):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line[:1] in (" ", "\t") and key:
                fields[key] += "\n" + line[1:]
            elif ":" in line:
                key, value = line.split(":", 1)
                key = key.strip().lower()
                fields[key] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false", "0", "off", "disable"):
            continue
        suites, components = tuple(fields.get("suites", "").split()), tuple(fields.get("components", "").split())
        found += [AptSource(uri, suites, components, _key_text(fields.get("signed-by", ""))) for uri in fields.get("uris", "").split()]
    return found


def _key_text(value: str) -> str:
    """An embedded key keeps its lines; in deb822 a lone dot stands for an empty one."""
    if "BEGIN PGP" not in value:
        return value.strip()
    return "\n".join("" if line.strip() == "." else line.strip() for line in value.strip().splitlines()) + "\n"


def choose_mirror(sources: Iterable[AptSource], keyring: Path = ARCHIVE_KEYRING) -> DebianMirror:
    """The first Debian archive among `sources` (apt's own order) and, if there is one, the security archive.

    Raises HostNotReady when none of them is a Debian archive or there is no key to check it with.
    """
    archive = security = None
    for source in sources:
        if not re.match(r"^(?:mirror\+)?(?:https?|ftp|file|copy)(?:\+[a-z]+)?:|^tor\+https?:", source.uri):
            continue
        for suite in source.suites:
            release, _, kind = suite.replace("/updates", "-security").partition("-")
            if release not in DEBIAN_RELEASES:
                continue
            if kind.startswith("security"):
                security = security or source
            elif not kind and "main" in source.components:
                archive = archive or source
    if archive is None:
        raise HostNotReady(
            "the host's apt sources name no Debian archive to take packages from",
            "add a source of Debian (a release such as bookworm, component main) to /etc/apt/sources.list.d",
        )
    return DebianMirror(_plain_uri(archive.uri), _plain_uri(security.uri) if security else "", _usable_key(archive.signed_by, keyring))


def _plain_uri(uri: str) -> str:
    """A `mirror+file:` list (as cloud images have) stands for its first entry: not every tool can read such lists."""
    if not uri.startswith("mirror+file:"):
        return uri.rstrip("/")
    listed = Path("/" + uri.removeprefix("mirror+file:").lstrip("/"))
    try:
        lines = listed.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise HostNotReady(f"cannot read the mirror list {listed}: {error.strerror}", "mend the host's apt sources") from error
    entries = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not entries:
        raise HostNotReady(f"the mirror list {listed} is empty", "mend the host's apt sources")
    return entries[0].rstrip("/")


def _usable_key(signed_by: str, keyring: Path) -> str:
    if "BEGIN PGP" in signed_by:
        return signed_by
    candidates = [Path(word) for word in re.split(r"[\s,]+", signed_by) if word.startswith("/")] + [keyring]
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    raise HostNotReady(f"no archive keyring: {candidates[-1]} does not exist", "apt-get install debian-archive-keyring")


def host_sources() -> list[AptSource]:
    """Every binary source of the host, in the order apt reads them."""
    shown = run_command(
        ["apt-config", "shell", "LIST", "Dir::Etc::sourcelist/f", "PARTS", "Dir::Etc::sourceparts/d"],
        timeout_s=QUERY_TIMEOUT_S,
        hint="a Debian host (or one with the `apt` package) is needed to fetch packages",
    ).decode()
    values = dict(word.split("=", 1) for word in shlex.split(shown))
    files = [Path(values.get("LIST", "/etc/apt/sources.list"))]
    parts = Path(values.get("PARTS", "/etc/apt/sources.list.d"))
    if parts.is_dir():
        files += sorted(path for path in parts.iterdir() if path.suffix in (".list", ".sources"))
    found: list[AptSource] = []
    for path in files:
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            found += parse_source_stanzas(text) if path.suffix == ".sources" else parse_source_lines(text)
    return found


def host_mirror() -> DebianMirror:
    """The Debian mirror the host itself uses. Raises HostNotReady when there is none."""
    return choose_mirror(host_sources())


def inherited_settings(dump: str) -> str:
    """The lines of `apt-config dump` that say how to reach a mirror: proxies, certificates, retries, IP version."""
    return "".join(line + "\n" for line in dump.splitlines() if _INHERITED_SETTINGS.match(line))


class PrivateApt:
    """An apt of its own below `folder` for one Debian release (with its updates, security and backports suites).

    Processes that share a folder take turns while fetching. Making an object writes the configuration and fetches
    nothing. `mirror` None means the host's.
    """

    def __init__(self, folder: Path, release: str, mirror: DebianMirror | None = None) -> None:
        if not _SUITE_NAME.match(release):
            raise InvalidInput(f"not a Debian release name: {release!r}", "use a code name such as bookworm")
        self.folder = folder.resolve()
        self.release = release
        self.mirror = mirror or host_mirror()
        self._write_configuration()

    @classmethod
    def for_suite(cls, folder: Path, suite: str) -> PrivateApt:
        """The apt for the release that `suite` (as in bookworm-backports) belongs to, below `folder`/<release>."""
        _check_words((), suite)
        release = suite.partition("-")[0]
        return cls(folder / release, release)

    @property
    def suites(self) -> tuple[str, ...]:
        """The suites packages are looked for in; backports are used only when asked for by name."""
        security = (f"{self.release}-security",) if self.mirror.security_uri else ()
        return (self.release, f"{self.release}-updates", *security, f"{self.release}-backports")

    def source_stanzas(self) -> str:
        """The deb822 sources of this apt."""
        key = self.mirror.signed_by
        if "BEGIN PGP" in key:
            key = "".join("\n " + (line or ".") for line in key.splitlines())
        stanzas = []
        for suite in self.suites:
            uri = self.mirror.security_uri if suite.endswith("-security") else self.mirror.uri
            stanzas.append(f"Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: main\nSigned-By: {key}\n")
        return "\n".join(stanzas)

    def _write_configuration(self) -> None:
        for part in ("lists/partial", "archives/partial", "empty/partial", "sources.d"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        (self.folder / "status").write_bytes(b"")
        (self.folder / "sources.d" / "debian.sources").write_text(self.source_stanzas(), encoding="utf-8")
        own = {
            "Dir::Etc::main": "/dev/null",
            "Dir::Etc::parts": "/dev/null",
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": f"{self.folder}/sources.d",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::State": f"{self.folder}",
            "Dir::State::lists": f"{self.folder}/lists",
            "Dir::State::status": f"{self.folder}/status",
            "Dir::Cache": f"{self.folder}",
            "Dir::Cache::archives": f"{self.folder}/archives",
            # Two caches of 37 MB would save half a second once or twice in the life of a node.
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            "Dir::Log": f"{self.folder}/log",
            "APT::Architecture": ARCHITECTURE,
            "APT::Install-Recommends": "false",
            "APT::Install-Suggests": "false",
            # The folder may lie where the _apt user cannot look; signatures are what makes the files safe.
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
        }
        dump = run_command(["apt-config", "dump"], timeout_s=QUERY_TIMEOUT_S).decode(errors="replace")
        text = inherited_settings(dump) + "".join(f'{key} "{value}";\n' for key, value in own.items())
        (self.folder / "apt.conf").write_text(text, encoding="utf-8")

    def _run(self, *argv: str | Path, timeout_s: float = QUERY_TIMEOUT_S, cwd: Path | None = None) -> str:
        return run_command(argv, timeout_s=timeout_s, cwd=cwd, env={"APT_CONFIG": str(self.folder / "apt.conf")}).decode(errors="replace")

    def update(self, progress: Progress = no_progress, *, force: bool = False) -> None:
        """Fetch the package lists unless they were fetched within the last hour. Raises Unavailable when that fails."""
        with file_lock(self.folder / "lock"):
            self._update(progress, force)

    def _update(self, progress: Progress, force: bool) -> None:
        stamp = self.folder / "updated"
        sources = self.source_stanzas()
        if not force and stamp.exists() and 0 <= time.time() - stamp.stat().st_mtime < LISTS_FRESH_S and stamp.read_text() == sources:
            return
        progress("fetch package lists", None, None)
        try:
            # Without Error-Mode a mirror that cannot be reached is only a warning and exit status 0.
            self._run("apt-get", "update", "-qq", "-o", "APT::Update::Error-Mode=any", timeout_s=UPDATE_TIMEOUT_S)
        except Internal as error:
            raise Unavailable(
                f"cannot fetch Debian package lists: {error.message}", "check the network and the host's apt sources"
            ) from error
        stamp.write_text(sources)

    def show(self, package: str, suite: str) -> dict[str, str]:
        """The control fields of the newest `package` in `suite`. Raises NotFound."""
        _check_words((package,), suite)
        try:
            shown = self._run("apt-cache", "show", "--no-all-versions", f"{package}/{suite}")
        except Internal as error:
            raise NotFound(
                f"{suite} has no package {package}", "name a suite that has it (guest.kernel_suite, guest.rootfs_suite)"
            ) from error
        fields = {}
        for line in shown.split("\n\n")[0].splitlines():
            if line[:1].strip() and ":" in line:
                key, value = line.split(":", 1)
                fields[key] = value.strip()
        return fields

    def closure(self, packages: Sequence[str], suite: str = "") -> list[DebFile]:
        """What an empty system would need to fetch for `packages` (names, or name=version), preferring `suite`."""
        # apt does not list what its archive folder already holds, so it is shown one that stays empty.
        empty = f"Dir::Cache::archives={self.folder}/empty"
        listed = self._run("apt-get", "install", "--print-uris", "-qq", "-y", "-o", empty, *self._wanted(packages, suite))
        found = re.findall(r"^'[^']*' (\S+\.deb) (\d+) ", listed, re.MULTILINE)
        return [DebFile(name, int(size_bytes)) for name, size_bytes in found]

    def _wanted(self, packages: Sequence[str], suite: str) -> list[str]:
        _check_words(packages, suite or self.release)
        return [*(("-t", suite) if suite else ()), *packages]

    def download(self, packages: Sequence[str], suite: str = "", *, closure: bool = True, progress: Progress = no_progress) -> list[Path]:
        """Fetch `packages` (names, or name=version) from `suite` first, by default with all they depend on.

        Returns the package files, which stay in this apt's archive folder. apt checks sizes, hashes and signatures.
        A file that has left the mirror since the lists were fetched makes it fetch the lists and try once more.
        """
        with file_lock(self.folder / "lock"):
            self._update(progress, force=False)
            try:
                return self._download(packages, suite, closure, progress)
            except Unavailable:
                self._update(progress, force=True)
                return self._download(packages, suite, closure, progress)

    def _download(self, packages: Sequence[str], suite: str, closure: bool, progress: Progress) -> list[Path]:
        archives = self.folder / "archives"
        command = ["apt-get", "install", "--download-only", "-qq", "-y"] if closure else ["apt-get", "download", "-qq"]
        files = self.closure(packages, suite) if closure else self._single_files(packages, suite)
        if not files:
            raise NotFound(
                f"apt finds nothing to fetch for {' '.join(packages)}", "name a suite that has it (guest.kernel_suite, guest.rootfs_suite)"
            )
        total_bytes = sum(file.size_bytes for file in files)

        def watch() -> None:
            done = sum(_size_bytes(archives / file.name) or _size_bytes(archives / "partial" / file.name) for file in files)
            progress(f"fetch {packages[0].partition('=')[0]} (bytes)", min(done, total_bytes), total_bytes)

        try:
            run_command(
                [*command, *self._wanted(packages, suite)],
                timeout_s=DOWNLOAD_TIMEOUT_S,
                cwd=archives,
                env={"APT_CONFIG": str(self.folder / "apt.conf")},
                watch=watch,
            )
        except Internal as error:
            raise Unavailable(
                f"cannot fetch {' '.join(packages)}: {error.message}", "check the network and the host's apt sources"
            ) from error
        watch()
        paths = [archives / file.name for file in files]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise Internal(f"apt-get reported success but did not fetch {', '.join(missing)}")
        return paths

    def discard(self, debs: Iterable[Path]) -> None:
        """Remove package files that `download` gave and that have been unpacked."""
        for path in debs:
            path.unlink(missing_ok=True)

    def _single_files(self, packages: Sequence[str], suite: str) -> list[DebFile]:
        listed = self._run("apt-get", "download", "--print-uris", "-qq", *self._wanted(packages, suite))
        return [DebFile(name, int(size)) for name, size in re.findall(r"^'[^']*' (\S+\.deb) (\d+) ", listed, re.MULTILINE)]


def unpack(debs: Iterable[Path], into: Path, progress: Progress = no_progress) -> None:
    """Unpack package files below `into`, running none of their scripts."""
    paths = list(debs)
    into.mkdir(parents=True, exist_ok=True)
    for number, path in enumerate(paths):
        progress("unpack (packages)", number, len(paths))
        run_command(["dpkg-deb", "--extract", path, into], timeout_s=UNPACK_TIMEOUT_S)
    progress("unpack (packages)", len(paths), len(paths))


def _check_words(packages: Sequence[str], suite: str) -> None:
    """Names come from the configuration and go into an argument list: none may look like an option."""
    for word in packages:
        if not _PACKAGE_NAME.match(word):
            raise InvalidInput(f"not a Debian package name: {word!r}", "use a name such as linux-image-cloud-amd64, or name=version")
    if not _SUITE_NAME.match(suite):
        raise InvalidInput(f"not a Debian suite name: {suite!r}", "use a name such as bookworm-backports")


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
