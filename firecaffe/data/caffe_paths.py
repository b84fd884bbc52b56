"""Search for a network's files in data.path, the current folder, the prototxt's or one above it."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from firecaffe.errors import DataError


@dataclass(frozen=True)
class CaffePlaces:
    """Places of files. `net` is the prototxt, `home` is `data.path` or empty."""

    net: str
    home: str

    def of(self, name: str) -> list[str]:
        """Return the paths that a name may stand for, the first choice first."""
        name = os.path.expanduser(name)
        return list(dict.fromkeys([*self._at_home(name), *_joined(self._folders(), name)]))

    def _at_home(self, name: str) -> list[str]:
        last = os.path.basename(name.rstrip("/"))
        names = [last] if os.path.isabs(name) else [name, last]
        return _joined([self.home], *names) if self.home else []

    def find(self, what: str, name: str) -> Path:
        """Return the first path that exists. Raises DataError, which lists where it looked."""
        places = self.of(name)
        for place in places:
            if os.path.exists(place):
                return Path(place)
        raise self._missing(what, name, places)

    def find_root(self, what: str, root_folder: str, file: str) -> str:
        """Return the prefix of a list's paths. Caffe adds root_folder as text, slash or not."""
        roots = self._roots(os.path.expanduser(root_folder))
        for root in roots:
            if os.path.isfile(root + file):
                return root
        raise self._missing(what, root_folder + file, [root + file for root in roots])

    def _roots(self, root_folder: str) -> list[str]:
        whole = [] if root_folder else [""]  # the list may have complete paths
        names = [""] if os.path.isabs(root_folder) else [root_folder, ""]
        at_home = _joined([self.home], *names) if self.home else []
        return [*at_home, *whole, *_joined(self._folders(), root_folder)]

    def _folders(self) -> list[str]:
        folder = Path(os.path.abspath(self.net)).parent
        above = folder.parents[:-1]  # without the root folder
        return [os.getcwd(), *map(str, (folder, *above))]

    def _missing(self, what: str, name: str, places: list[str]) -> DataError:
        others = "nor in a folder above the latter"
        remedy = "set data.path to the folder that it is in now"
        if self.home:
            others, remedy = "nor where it is without data.path", "set data.path"
        looked, others = ", ".join(places[:2]), f", {others}" if places[2:] else ""
        return DataError(f'{what} "{name}" is not there: looked for {looked}{others}; {remedy}')


def _joined(folders: Iterable[str], *names: str) -> list[str]:
    return list(dict.fromkeys(os.path.join(folder, name) for folder in folders for name in names))
