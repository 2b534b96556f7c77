"""Result stores: a folder, or anything that fsspec reaches."""

from oraculo.stores.objects.folder import FolderObjects
from oraculo.stores.objects.remote import RemoteObjects

__all__ = ["FolderObjects", "RemoteObjects"]
