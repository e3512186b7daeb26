"""Pipeline messages (feature ``pp``)."""
