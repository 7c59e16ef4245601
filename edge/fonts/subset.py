"""Makes the fonts of this folder from the files of Debian's packages (see README.md).

    python3 subset.py FOLDER    the folder with DejaVuSans.ttf, DejaVuSans-Bold.ttf and unifont.otf as Debian has them
"""

import pathlib
import sys
import unicodedata

import zopfli.zlib
from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont

HERE = pathlib.Path(__file__).parent

# Everything that is printed in bold is a text of the service.
BOLD = [(0x20, 0x7E), (0xA0, 0xFF), (0x2010, 0x2027)]

# The alphabets: Latin with all extensions, phonetics, Greek, Cyrillic, Armenian, Hebrew, Arabic, Georgian; punctuation, currencies,
# letter-like symbols, number forms, ligatures and presentation forms.
REGULAR = [
    (0x20, 0x7E), (0xA0, 0x58F), (0x5D0, 0x5F4), (0x600, 0x6FF), (0x750, 0x77F), (0x10A0, 0x10FF), (0x1C80, 0x1C8F), (0x1D00, 0x1DBF),
    (0x1E00, 0x1FFF), (0x2010, 0x2027), (0x2030, 0x205E), (0x2070, 0x20BF), (0x2100, 0x214F), (0x2150, 0x218F), (0x2190, 0x2199),
    (0x2212, 0x2212), (0x25CC, 0x25CC), (0x2C60, 0x2C7F), (0x2D00, 0x2D2F), (0xA640, 0xA69F), (0xA720, 0xA7FF), (0xFB00, 0xFB4F),
    (0xFB50, 0xFDFF), (0xFE70, 0xFEFE),
]

# CJK Unified Ideographs Extension A, 6,592 rare characters that would take a fifth of the space, and scripts that only historians write:
# Ogham, Runic, Glagolitic, Coptic, Phags-pa.
RARE = [(0x3400, 0x4DBF), (0x1680, 0x16FF), (0x2C00, 0x2C5F), (0x2C80, 0x2CFF), (0xA840, 0xA87F)]


def within(ranges):
    return {character for first, last in ranges for character in range(first, last + 1)}


def is_of_a_name(character):
    """Letters, marks, digits, punctuation, spaces, currencies and modifiers: no pictures, box drawing, or unassigned code points."""
    category = unicodedata.category(chr(character))
    return category[0] in "LMNP" or category in ("Zs", "Sc", "Sk")


def make(source, name, wanted):
    options = Options(layout_features=["*"], hinting=False, name_IDs=["*"], drop_tables=["FFTM", "MATH", "kern"], notdef_outline=True)
    font = TTFont(source / name, recalcTimestamp=False)
    subsetter = Subsetter(options)
    subsetter.populate(unicodes=wanted)
    subsetter.subset(font)
    made = HERE / name
    font.save(made)
    compressed = zopfli.zlib.compress(made.read_bytes(), numiterations=15)
    (HERE / f"{name}.zlib").write_bytes(compressed)
    print(f"{name}: {len(font.getBestCmap())} characters, {made.stat().st_size} bytes, compressed {len(compressed)}")
    made.unlink()
    return set(font.getBestCmap())


source = pathlib.Path(sys.argv[1])
make(source, "DejaVuSans-Bold.ttf", within(BOLD))
regular = make(source, "DejaVuSans.ttf", within(REGULAR))
others = filter(is_of_a_name, TTFont(source / "unifont.otf").getBestCmap())
make(source, "unifont.otf", set(others) - within(RARE) - regular)
