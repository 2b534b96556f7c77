"""Large results: in a folder, or wherever fsspec reaches."""

from oraculo.stores.objects.folder import FolderObjects
from oraculo.stores.objects.remote import RemoteObjects

__all__ = ["FolderObjects", "RemoteObjects"]
