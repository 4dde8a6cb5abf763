"""The endpoint picker of Kubernetes' Gateway API inference extension: it tells an Envoy which model server gets a request."""
