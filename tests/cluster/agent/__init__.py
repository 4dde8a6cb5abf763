"""A node agent of the test, in the kubelet's place: pods of a real API server become local processes (../README.md says how true
to the original). It also answers for names and addresses of Services, as a cluster's DNS and kube-proxy do."""
