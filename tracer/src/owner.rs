//! Which container and pod a process belongs to, from its control group.

use crate::record::Text;

/// Digits of a container id; runtimes use 64, some tools shorten them.
const CONTAINER_ID: std::ops::RangeInclusive<usize> = 12..=64;

/// Owner as a control group path tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// Container id.
    pub container: Option<Text>,
    /// Unique id of the pod, with dashes.
    pub pod_uid: Option<Text>,
}

impl Owner {
    /// Reads `path`. The innermost container and pod count: containers run inside containers.
    pub fn of_cgroup(path: &str) -> Self {
        let path = path.strip_suffix(" (deleted)").unwrap_or(path);
        let mut owner = Self::default();
        let mut inside_kubepods = false;
        let mut after_docker = false;
        // containerd under runc's own naming joins slice, runtime and id with colons.
        for part in path.split(['/', ':']) {
            // Seen from inside a control group namespace, the way up to the others hides their parents.
            inside_kubepods |= part.starts_with("kubepods") || part == "..";
            if let Some(uid) = pod_uid(part).filter(|_| inside_kubepods) {
                owner.pod_uid = Some(uid);
                owner.container = None;
            } else if let Some(id) = container_id(part, inside_kubepods || after_docker) {
                owner.container = Some(id);
            }
            // `docker/<id>` (cgroupfs) and `machine.slice/libpod-<id>.scope` have no pod.
            after_docker = matches!(part, "docker" | "containerd" | "lxc" | "libpod_parent") || part.starts_with("ecs");
        }
        owner
    }
}

/// `kubepods-burstable-pod<uid>.slice` (dashes written as underscores) or `pod<uid>`.
fn pod_uid(part: &str) -> Option<Text> {
    let name = part.strip_suffix(".slice").unwrap_or(part);
    let uid = if name.starts_with("kubepods") { name.rsplit_once("-pod")?.1 } else { name.strip_prefix("pod")? };
    let uid = uid.replace('_', "-");
    // Static pods have a hash of 32 digits without dashes instead.
    let plausible = matches!(uid.len(), 32 | 36) && uid.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
    plausible.then(|| uid.into())
}

/// `<runtime>-<id>.scope`, or a bare id where the parent says that ids follow.
fn container_id(part: &str, bare_allowed: bool) -> Option<Text> {
    let id = match part.strip_suffix(".scope") {
        Some(scope) => ["cri-containerd-", "crio-", "docker-", "libpod-", "nerdctl-"]
            .into_iter()
            .find_map(|runtime| scope.strip_prefix(runtime))?,
        None if bare_allowed => part,
        None => part.strip_prefix("crio-").or_else(|| part.strip_prefix("libpod-"))?,
    };
    let plausible = CONTAINER_ID.contains(&id.len()) && id.bytes().all(|b| b.is_ascii_hexdigit());
    plausible.then(|| id.into())
}

#[cfg(test)]
mod tests {
    use super::Owner;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const UID: &str = "11111111-2222-3333-4444-555555555555";

    fn owner(path: &str) -> (Option<String>, Option<String>) {
        let owner = Owner::of_cgroup(&path.replace("ID", ID));
        (owner.container.map(|id| id.to_string()), owner.pod_uid.map(|uid| uid.to_string()))
    }

    #[test]
    fn pods_of_both_cgroup_drivers() {
        let both = (Some(ID.to_owned()), Some(UID.to_owned()));
        for path in [
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod11111111_2222_3333_4444_555555555555.slice/cri-containerd-ID.scope",
            "/kubepods.slice/kubepods-pod11111111_2222_3333_4444_555555555555.slice/crio-ID.scope",
            "/kubepods/burstable/pod11111111-2222-3333-4444-555555555555/ID",
            "/kubepods/besteffort/pod11111111-2222-3333-4444-555555555555/ID (deleted)",
            "/../../pod11111111-2222-3333-4444-555555555555/ID",
            "/../../kubepods-burstable-pod11111111_2222_3333_4444_555555555555.slice/cri-containerd-ID.scope",
            "/system.slice/containerd.service/kubepods-besteffort-pod11111111_2222_3333_4444_555555555555.slice:cri-containerd:ID",
        ] {
            assert_eq!(owner(path), both, "{path}");
        }
    }

    #[test]
    fn containers_without_a_pod() {
        for path in [
            "/system.slice/docker-ID.scope",
            "/docker/ID",
            "/machine.slice/libpod-ID.scope",
            "/user.slice/user-1.slice/libpod-ID.scope/container",
        ] {
            assert_eq!(owner(path), (Some(ID.to_owned()), None), "{path}");
        }
    }

    #[test]
    fn the_innermost_container_counts() {
        let inner = "f".repeat(64);
        assert_eq!(owner(&format!("/docker/ID/docker/{inner}")), (Some(inner), None));
    }

    #[test]
    fn other_groups_belong_to_nobody() {
        for path in [
            "",
            "/",
            "/user.slice/user-1000.slice/session-3.scope",
            "/system.slice/slurmstepd.scope/job_881/step_0",
            "/system.slice/docker-nothex.scope",
            "/pod11111111-2222-3333-4444-555555555555",
            "/system.slice/podman.service",
        ] {
            assert_eq!(owner(path), (None, None), "{path}");
        }
    }
}
