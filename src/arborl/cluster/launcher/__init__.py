"""`arborl cluster`: a Ray cluster on hosts that ssh reaches.

cluster_spec.py  The cluster's file: hosts, ssh, environment, ports
ssh_hosts.py     Requests to hosts over the system's ssh
on_host/         The program that runs on a host
ssh_cluster.py   Setup, status, restart, cleanup
cluster_jobs.py  Jobs and logs
"""
