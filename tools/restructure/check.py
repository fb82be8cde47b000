"""Lists what still has an old name: moved modules, old paths, renamed classes. Exit status 1 if any is left.

Usage: python tools/restructure/check.py
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
MOVES: dict[str, str] = json.loads((HERE / "moves.json").read_text())
TABLE: dict[str, dict[str, str]] = tomllib.loads((HERE / "renames.toml").read_text())


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    old_modules = sorted(
        o.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for o in MOVES
        if o.startswith("src/") and o.endswith(".py")
    )
    module = re.compile(r"\b(" + "|".join(map(re.escape, reversed(old_modules))) + r")\b")
    old_path = re.compile(r"(?<![\w./-])(?:src/atoll/)?(?:host|keys|learn|node|sim)/[a-z_0-9/]+\.py\b")
    found = [f"{old}: not moved" for old in MOVES if Path(old).exists()]
    defined: dict[str, str] = {}
    for path in listed:
        file = Path(path)
        if path.startswith("tools/") or file.suffix not in {".py", ".md", ".toml", ""} or not file.is_file():
            continue
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            found += [f"{path}:{number}: {hit[0]}" for hit in module.finditer(line)]
            found += [f"{path}:{number}: {hit[0]}" for hit in old_path.finditer(line)]
            if path.startswith("src/") and (hit := re.match(r"\s*class (\w+)", line)):
                defined[hit[1]] = f"{path}:{number}"
    new = {name for names in TABLE.values() for name in names.values()}
    renamed = {old for names in TABLE.values() for old in names} - new
    found += [f"{defined[old]}: class {old} has its old name" for old in sorted(renamed & set(defined))]
    print("\n".join(found[:200]))
    print(f"{len(found)} places")
    return 1 if found else 0


sys.exit(main())
