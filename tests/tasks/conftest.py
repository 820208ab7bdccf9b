"""Data that several tasks are tried on."""

import pytest

from tests.tasks.pets import prepare_pets


@pytest.fixture(scope="session")
def pets_dir(tmp_path_factory):
    """A data_dir in which oxford_iiit_pet is prepared, by its own builder."""
    return prepare_pets(tmp_path_factory.mktemp("a folder with spaces"))
