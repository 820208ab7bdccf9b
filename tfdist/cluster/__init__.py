"""Descriptions of clusters: flags, TF_CONFIG, Vertex AI, Slurm, Kubernetes -> `ClusterConfig`.

Each format has a module. The `parse_*` functions are pure: they take a text or a mapping and
return a `ClusterConfig`, or None if it describes no cluster.

tfdist's own environment variables for Slurm and Kubernetes, with their defaults:

    TFDIST_NUM_PS        parameter servers among the tasks (0); if any, the first task is the chief
    TFDIST_NUM_WORKERS   workers, without the chief (Kubernetes only)
    TFDIST_PORT          first port (Slurm: derived from the job's id; Kubernetes: 2222)
    TFDIST_SERVICE       the headless Service through which the pods find one another (Kubernetes)
    TFDIST_JOB           the Job's name (Kubernetes; derived from HOSTNAME)

tfdist.launch sets two more for its tasks:

    TFDIST_LAUNCH_DIR    directory of the logs, the step reached and the record of restarts
    TFDIST_TOKEN         the secret by which the tasks know one another; on several hosts, the user
                         sets it, or TFDIST_TOKEN_FILE, the path of a file that holds it
"""

from tfdist.cluster.config import (
    ROLES,
    ClusterConfig,
    check_cluster,
    make_evaluator_error,
    split_address,
)
from tfdist.cluster.environment import (
    LAUNCH_DIR,
    TOKEN,
    TOKEN_FILE,
    add_xla_flag,
    can_redraw,
    find_launch_dir,
    find_metadata_host,
    find_tf_config,
    find_token,
    has_peers,
    quiet_environment,
    read_environment,
    set_tf_config,
)
from tfdist.cluster.hosts import parse_host_list, parse_hosts
from tfdist.cluster.kubernetes import parse_kubernetes
from tfdist.cluster.resolution import resolve_cluster
from tfdist.cluster.slurm import expand_node_list, parse_slurm
from tfdist.cluster.tf_config import parse_tf_config
from tfdist.cluster.vertex import parse_vertex
