"""The programs, by name."""

from benchmarks.programs.adapters import Program
from benchmarks.programs.catalogs import guides, images, pictures, recipes, tables, texts

PROGRAMS: dict[str, Program] = {
    program.name: program
    for programs in (
        recipes.PROGRAMS,
        guides.PROGRAMS,
        images.PROGRAMS,
        pictures.PROGRAMS,
        texts.PROGRAMS,
        tables.PROGRAMS,
    )
    for program in programs
}
