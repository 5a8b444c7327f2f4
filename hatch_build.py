"""Compiles the native core when a wheel is made, or the project is installed editable."""

import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src", "tidemill", "native")


class NativeCore(BuildHookInterface):
    """The hook that puts the kernels into the wheel, or, installed editable, beside their
    source. Without a compiler there are none, and numpy computes everything."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling's interface."""
        native = Path(self.root, NATIVE)
        spec = spec_from_file_location("build_native", native / "build.py")
        assert spec is not None and spec.loader is not None
        building = module_from_spec(spec)
        spec.loader.exec_module(building)
        self._made = TemporaryDirectory()
        editable = version == "editable"
        try:
            library = building.build(native if editable else Path(self._made.name))
        except building.CannotCompile as error:
            self.app.display_warning(f"The native core was not built, numpy computes everything. {error}")
            if not editable and (why := Path(self._made.name, building.WHY)).exists():
                build_data["force_include"][str(why)] = str(Path("tidemill", "native", why.name))
            return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        if not editable:
            build_data["force_include"][str(library)] = str(Path("tidemill", "native", library.name))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """See hatchling's interface."""
        self._made.cleanup()
