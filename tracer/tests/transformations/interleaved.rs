//! Two scenarios on one host, on devices and in processes of their own: each keeps its verdicts.

use super::{PIDS, TIMES, assert_alike, corpus, events, map_fields, map_numbers, span, ts, verdicts};
use serde_json::{Value, json};

/// The fields that name an owner, and handles, which only have to differ within a process.
const OWNERS: [&str; 5] = ["pod", "container", "job", "ipc_id", "node"];
const GROUPS: [&str; 3] = ["cgroup", "old", "new"];
/// Below the kernel's largest pid, 4,194,304: a row that names a larger one is taken for a misread one.
const ANOTHER_PID: u64 = 2_000_000;

/// `guest` as it would be on the host of `host`: on devices above the host's, and ending when it does.
fn moved_in(guest: &Value, host: &Value) -> Value {
    let above = host["devices"].as_array().unwrap().iter().map(|device| device["device"].as_u64().unwrap() + 1).max();
    let (guest_start, guest_end) = span(guest);
    let (host_start, host_end) = span(host);
    let late = (host_end - host_start).saturating_sub(guest_end - guest_start);
    let mut moved = guest.clone();
    let above = above.unwrap_or(0);
    let all = [moved["devices"].take(), moved["events"].take()].map(|mut part| {
        map_numbers(&mut part, &["device"], &|device| device + above);
        rename_files(&mut part, above);
        map_numbers(&mut part, &PIDS, &|pid| if pid > 1 { pid + ANOTHER_PID } else { pid });
        map_numbers(&mut part, &TIMES, &|ns| {
            // What was there when the tracer came was there when it came to the host.
            if ns > guest_start {
                ns - guest_start + host_start + late
            } else {
                host_start.saturating_sub(guest_start - ns)
            }
        });
        for (keys, prefix) in [(&OWNERS[..], "guest-"), (&GROUPS[..], "/guest")] {
            map_fields(&mut part, keys, &|name| match name.as_str() {
                Some(name) => json!(format!("{prefix}{name}")),
                None => name.clone(),
            });
        }
        part
    });
    let [devices, mut records] = all;
    records
        .as_array_mut()
        .unwrap()
        .retain(|event| ts(event) <= host_end && !matches!(event["kind"].as_str(), Some("tracer_start")));
    moved["devices"] = devices;
    moved["events"] = records;
    moved
}

/// The files of devices, under the numbers of devices above the host's.
fn rename_files(value: &mut Value, above: u64) {
    match value {
        Value::String(name) => {
            if let Some(minor) = name.strip_prefix("nvidia").and_then(|minor| minor.parse::<u64>().ok()) {
                *name = format!("nvidia{}", minor + above);
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|value| rename_files(value, above)),
        Value::Object(map) => map.values_mut().for_each(|value| rename_files(value, above)),
        _ => {}
    }
}

/// The holders of device files at `ns`: whoever has a context of its own, what it forked, and what a
/// walk of its own found.
fn holders(scenario: &Value, ns: u64) -> Vec<Value> {
    let mut holders: Vec<Value> = Vec::new();
    let holder = |event: &Value, files: &Value| json!({"tgid": event["tgid"], "start_ns": event["start_ns"], "comm": event["comm"], "files": files});
    for event in events(scenario).iter().filter(|event| ts(event) <= ns) {
        let same = |holder: &Value| holder["tgid"] == event["tgid"] && holder["start_ns"] == event["start_ns"];
        let parent =
            |holder: &&Value| holder["tgid"] == event["parent_tgid"] && holder["start_ns"] == event["parent_start_ns"];
        let files = match event["kind"].as_str() {
            Some("proc_snapshot") => event["gpu_fds"].clone(),
            Some("ctx_create") => json!(["nvidiactl", format!("nvidia{}", event["device"])]),
            Some("fork") => holders.iter().find(parent).map_or(Value::Null, |parent| parent["files"].clone()),
            _ => Value::Null,
        };
        if files.as_array().is_some_and(|files| !files.is_empty()) && !holders.iter().any(same) {
            holders.push(holder(event, &files));
        }
        match event["kind"].as_str() {
            Some("exec") => holders.retain(|holder| !same(holder)),
            Some("exit") if event["group_dead"] == true => holders.retain(|holder| !same(holder)),
            Some("fd_scan") if event["complete"] == true => {
                holders.clone_from(event["holders"].as_array().unwrap());
            }
            _ => {}
        }
    }
    holders
}

/// The events of `one`, whose walks of the open files find those of `other` as well.
fn walking_both(one: &Value, other: &Value) -> Vec<Value> {
    let mut all = events(one).clone();
    for scan in all.iter_mut().filter(|event| event["kind"] == "fd_scan") {
        let more = holders(other, ts(scan));
        scan["holders"].as_array_mut().unwrap().extend(more);
    }
    all
}

/// By time; a walk comes before what else happens at its time, in every host alike.
fn in_order(all: &mut [Value]) {
    all.sort_by_key(|event| (ts(event), event["kind"] != "fd_scan"));
}

/// `one` with the walks of `other` too, as they would have been on the host of `one` alone.
fn walked(one: &Value, other: &Value) -> Value {
    let mut all = events(one).clone();
    for scan in events(other).iter().filter(|event| event["kind"] == "fd_scan") {
        let mut scan = scan.clone();
        scan["holders"] = Value::Array(holders(one, ts(&scan)));
        all.push(scan);
    }
    in_order(&mut all);
    let mut walked = one.clone();
    walked["events"] = Value::Array(all);
    walked
}

fn merged(host: &Value, guest: &Value) -> Value {
    let mut all = walking_both(host, guest);
    all.extend(walking_both(guest, host));
    in_order(&mut all);
    let mut both = host.clone();
    both["events"] = Value::Array(all);
    both["devices"].as_array_mut().unwrap().extend(guest["devices"].as_array().unwrap().iter().cloned());
    both
}

/// What one ring loses is lost to both, and a metric that names nobody can be told to be the only
/// process's while there is only one.
fn is_of_the_whole_host(event: &Value) -> bool {
    let names = |key: &str| !event["labels"][key].is_null();
    event["kind"] == "lost_events"
        || event["kind"] == "service_metric" && !["tgid", "device", "pod"].into_iter().any(names)
}

#[test]
fn two_cases_on_one_host_keep_their_verdicts() {
    let mut with_verdicts = 0;
    for guest in ["d04", "d05", "d20", "o01", "p07"].map(corpus::case) {
        for host in corpus::all() {
            if events(&host.json).iter().any(is_of_the_whole_host) {
                continue;
            }
            let moved = moved_in(&guest.json, &host.json);
            let (host_json, moved) = (walked(&host.json, &moved), walked(&moved, &host.json));
            // A case that is cut off early may already say that it is too early to tell.
            let mut apart = verdicts(&corpus::run(&host_json));
            // The tracer is there when the guest's processes come.
            let mut alone = moved.clone();
            let start = events(&host_json).iter().find(|event| event["kind"] == "tracer_start").cloned();
            alone["events"].as_array_mut().unwrap().splice(0..0, start);
            let of_guest = verdicts(&corpus::run(&alone));
            with_verdicts += usize::from(!of_guest.is_empty());
            apart.extend(of_guest);
            apart.sort();
            let together = verdicts(&corpus::run(&merged(&host_json, &moved)));
            assert_alike(&together, &apart, &format!("{} in {}", guest.id, host.id));
        }
    }
    assert!(with_verdicts > 100, "{with_verdicts}");
}
