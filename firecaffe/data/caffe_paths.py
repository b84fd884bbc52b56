"""Where the files lie that a net names: as Caffe takes them, from the current folder; else from the
prototxt's, or one above it; or wherever `data.path` says that they are now.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from firecaffe.errors import DataError


@dataclass(frozen=True)
class Places:
    """net: the prototxt. home: `data.path`."""

    net: str
    home: str = ""

    def of(self, name: str) -> list[str]:
        """Where a name may lead to, the first choice first."""
        name = os.path.expanduser(name)
        if not self.home:
            return _joined(self._folders(), name)
        home = os.path.expanduser(self.home)
        inside = [] if os.path.isabs(name) else [os.path.join(home, name)]
        return [*inside, os.path.join(home, os.path.basename(name.rstrip("/"))), name]

    def find(self, what: str, name: str) -> Path:
        """Raises: DataError that says where was looked, if it is in none of the places."""
        places = self.of(name)
        for place in places:
            if os.path.exists(place):
                return Path(place)
        raise self._missing(what, name, places)

    def find_root(self, what: str, root_folder: str, file: str) -> str:
        """What has to stand before the paths of a list, of which one is `file`. Caffe puts the
        root_folder there as text, whether it ends in a slash or not.
        """
        roots = self._roots(os.path.expanduser(root_folder))
        for root in roots:
            if os.path.isfile(root + file):
                return root
        raise self._missing(what, root_folder + file, [root + file for root in roots])

    def _roots(self, root_folder: str) -> list[str]:
        if not root_folder and not self.home:
            return ["", *_joined(self._folders(), "")]  # the paths may be whole
        if not self.home:
            return _joined(self._folders(), root_folder)
        home = os.path.expanduser(self.home)
        inside = [] if os.path.isabs(root_folder) else [os.path.join(home, root_folder)]
        return [*inside, os.path.join(home, ""), root_folder]

    def _folders(self) -> list[Path]:
        folder = Path(os.path.abspath(self.net)).parent
        return [Path.cwd(), folder, *folder.parents[:-1]]  # not the root of all

    def _missing(self, what: str, name: str, places: list[str]) -> DataError:
        above = "" if self.home or len(places) < 3 else ", nor in a folder above the latter"
        remedy = "data.path" if self.home else "data.path to the folder that it is in now"
        looked = ", ".join(places[:2])
        return DataError(f'{what} "{name}" is not there: looked for {looked}{above}; set {remedy}')


def _joined(folders: Iterable[Path], name: str) -> list[str]:
    return list(dict.fromkeys(os.path.join(each, name) for each in folders))
