"""The whole cluster in one process on virtual time: the real router and workers, a modelled device and links."""
