"""The modules that make generated pages, importable as the site's build imports them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
