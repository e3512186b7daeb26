"""Expert parallel dispatchers and experts (feature ``ep``)."""
