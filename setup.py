"""What pyproject.toml cannot say: a wheel may carry the CPU's kernels, compiled for common processors.

    pip wheel . --no-deps --config-settings=--build-option=--kernels

Without that option a wheel is plain Python and runs anywhere; kernels are then compiled where they are first used.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.install_lib import install_lib
from setuptools.errors import ExecError, OptionError

sys.path.insert(0, str(Path(__file__).parent))  # a build sees the tools that it asks for and nothing else
from ramify.cpu import prebuilt
from ramify.cpu.compiler import NoCompilerError


class Wheel(bdist_wheel):
    user_options: ClassVar = [
        *bdist_wheel.user_options,
        ("kernels", None, "carry the CPU's kernels, compiled (on Linux and x86-64)"),
    ]
    boolean_options: ClassVar = [*bdist_wheel.boolean_options, "kernels"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.kernels = False

    def finalize_options(self) -> None:
        if self.kernels:
            if (sys.platform, platform.machine()) != ("linux", "x86_64"):
                raise OptionError("--kernels makes wheels for Linux on x86-64, on such machines")
            self.distribution.has_ext_modules = lambda: True  # it is installed where a platform's own files go
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        # The libraries are called by ctypes: any Python of this platform can.
        return ("py3", "none", prebuilt.PLATFORM) if self.kernels else super().get_tag()


class Library(install_lib):
    """Compiles straight into what becomes the wheel, so that nothing is left behind for the next one."""

    def run(self) -> None:
        super().run()
        if self.get_finalized_command("bdist_wheel").kernels:
            try:
                prebuilt.build_all(Path(self.install_dir, "ramify", "cpu", prebuilt.FOLDER.name))
            except NoCompilerError as error:
                raise ExecError(f"the CPU's kernels cannot be compiled: {error}") from None


setup(cmdclass={"bdist_wheel": Wheel, "install_lib": Library})
