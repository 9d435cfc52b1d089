//! For each category: the change that makes its claim untrue takes the verdict away.

use super::{SECOND, corpus, events, span, ts};
use serde_json::{Value, json};
use vramtrace::finding::{Category, Finding, Report};

/// A scenario with its events changed or (`None`) left out; `edit` is told the seconds since its start.
fn edited(id: &str, edit: impl Fn(Value, f64) -> Option<Value>) -> Value {
    let mut scenario = corpus::case(id).json;
    let (start, _) = span(&scenario);
    let seconds = |event: &Value| (ts(event) - start) as f64 / SECOND as f64;
    let kept = events(&scenario).iter().filter_map(|event| edit(event.clone(), seconds(event))).collect();
    scenario["events"] = Value::Array(kept);
    scenario
}

/// A changed scenario changed further.
fn edited_again(mut scenario: Value, edit: impl Fn(Value, f64) -> Value) -> Value {
    let (start, _) = span(&scenario);
    let changed = events(&scenario).iter().map(|event| edit(event.clone(), (ts(event) - start) as f64 / SECOND as f64));
    scenario["events"] = changed.collect();
    scenario
}

/// A scenario with more events, each put where its time says.
fn with(id: &str, more: impl Fn(&Value) -> Vec<Value>) -> Value {
    let mut scenario = corpus::case(id).json;
    let more = more(&scenario);
    let all = scenario["events"].as_array_mut().unwrap();
    all.extend(more);
    all.sort_by_key(ts);
    scenario
}

/// The first event that `is` true of.
fn first(scenario: &Value, is: impl Fn(&Value) -> bool) -> Value {
    events(scenario).iter().find(|event| is(event)).unwrap().clone()
}

/// `event` at another time, with some of its fields set.
fn at(mut event: Value, seconds: u64, scenario: &Value, fields: &Value) -> Value {
    event["ts_ns"] = json!(span(scenario).0 + seconds * SECOND);
    for (key, value) in fields.as_object().unwrap() {
        event[key] = value.clone();
    }
    event
}

/// With `fields` where an event is of this kind.
fn set(mut event: Value, kind: &str, fields: &Value) -> Value {
    if event["kind"] == kind {
        for (key, value) in fields.as_object().unwrap() {
            event[key] = value.clone();
        }
    }
    event
}

fn of(report: &Report, category: Category) -> Vec<&Finding> {
    report.findings.iter().filter(|finding| finding.category == category).collect()
}

/// The scenario makes the claim and its changed form does not. Returns the second's report.
fn takes_away(id: &str, category: Category, changed: &Value) -> Report {
    assert!(!of(&corpus::run(&corpus::case(id).json), category).is_empty(), "{id} without the change");
    let report = corpus::run(changed);
    assert!(of(&report, category).is_empty(), "{id}: {:?}", of(&report, category));
    report
}

/// Nothing is billed from `exit_s` and a second on.
fn back_in_time(id: &str, exit_s: f64) -> Value {
    edited(id, |event, seconds| {
        let empty = json!({"procs": [], "used": 4_194_304});
        Some(if seconds > exit_s + 1.0 { set(event, "nvml_sample", &empty) } else { event })
    })
}

#[test]
fn orphan_process_owner_lives_on() {
    let owner_lives = edited("d02", |event, _| {
        let of_owner = event["tgid"] == 31913 && (event["kind"] == "exit" || event["kind"] == "reap");
        (!of_owner && event["kind"] != "proc_state").then_some(event)
    });
    takes_away("d02", Category::OrphanProcess, &owner_lives);
    let container_stays = edited("d12", |event, _| {
        let end = event["kind"] == "container_event" || event["tgid"] == 68010 && event["kind"] != "proc_snapshot";
        (!end && event["kind"] != "proc_state").then_some(event)
    });
    takes_away("d12", Category::OrphanProcess, &container_stays);
}

#[test]
fn inherited_fd_holder_memory_comes_back_or_nobody_holds_the_files() {
    takes_away("d03", Category::InheritedFdHolder, &back_in_time("d03", 30.0));

    // The workers exec: their files are closed, so the driver is to blame for what stays.
    let mut execs = with("d03", |scenario| {
        let forks = events(scenario).iter().filter(|event| event["kind"] == "fork");
        forks.map(|fork| set(fork.clone(), "fork", &json!({"kind": "exec"}))).collect()
    });
    for scan in execs["events"].as_array_mut().unwrap().iter_mut().filter(|event| event["kind"] == "fd_scan") {
        scan["holders"] = json!([]);
    }
    let report = takes_away("d03", Category::InheritedFdHolder, &execs);
    assert!(!of(&report, Category::ResidualAfterExit).is_empty());
}

#[test]
fn residual_after_exit_memory_comes_back_or_a_child_holds_the_files() {
    takes_away("o03", Category::ResidualAfterExit, &back_in_time("o03", 20.0));
    let held = with("o01", |scenario| {
        let start = first(scenario, |event| event["kind"] == "proc_start" && event["tgid"] == 9100);
        let child = json!({"kind": "fork", "pid": 9150, "tgid": 9150, "start_ns": span(scenario).0 + 5 * SECOND,
            "comm": "loader", "ppid": 9100, "parent_tgid": 9100, "parent_start_ns": start["start_ns"]});
        vec![at(start, 5, scenario, &child)]
    });
    let held = edited_again(held, |event, _| {
        let child = json!([{"tgid": 9150, "start_ns": 1_000_005 * SECOND, "comm": "loader", "files": ["nvidia0"]}]);
        set(event, "fd_scan", &json!({"holders": child}))
    });
    let report = takes_away("o01", Category::ResidualAfterExit, &held);
    assert!(!of(&report, Category::InheritedFdHolder).is_empty());
}

#[test]
fn stuck_in_driver_sleeps_as_anyone_may() {
    let asleep = edited("d18", |event, _| {
        (event["kind"] != "kmsg").then(|| set(event, "proc_state", &json!({"state": "S", "wchan": "do_exit"})))
    });
    takes_away("d18", Category::StuckInDriver, &asleep);
}

#[test]
fn ipc_pinned_importer_closes() {
    let closed = with("p06", |scenario| {
        let (_, end) = span(scenario);
        let imports = events(scenario).iter().filter(|event| event["kind"] == "ipc_import");
        let close = json!({"kind": "ipc_close", "api": "cuIpcCloseMemHandle"});
        let closes = imports.map(|import| at(import.clone(), 239, scenario, &close)).collect::<Vec<_>>();
        assert!(closes.iter().all(|close| ts(close) < end));
        closes
    });
    let closed = edited_again(closed, |event, seconds| {
        // The memory leaves with the last import.
        let importer = event["procs"].as_array().cloned().unwrap_or_default();
        let small = importer.into_iter().map(|mut row| {
            if row["pid"] == 50177 {
                row["used"] = json!(600_000_000);
            }
            row
        });
        let procs: Vec<Value> = small.filter(|row| row["pid"] != 50466).collect();
        let used = procs.iter().filter_map(|row| row["used"].as_u64()).sum::<u64>() + 4_194_304;
        let after = json!({"procs": procs, "used": used});
        if seconds > 239.5 { set(event, "nvml_sample", &after) } else { event }
    });
    takes_away("p06", Category::IpcPinned, &closed);
}

#[test]
fn app_leak_survivors_are_never_made() {
    let refused = edited("d05", |event, _| {
        let survivor = event["stack_id"] == "S7";
        Some(if survivor { set(event, "alloc", &json!({"result": 2})) } else { event })
    });
    takes_away("d05", Category::AppLeak, &refused);
}

#[test]
fn untracked_growth_settles() {
    let settled = edited("p01", |mut event, seconds| {
        if seconds > 120.0 && (event["kind"] == "module_load" || event["kind"] == "nvml_sample") {
            if event["kind"] == "module_load" {
                return None;
            }
            for row in event["procs"].as_array_mut().unwrap() {
                if row["pid"] == 40877 {
                    row["used"] = json!(2_200_000_000_u64);
                }
            }
        }
        Some(event)
    });
    takes_away("p01", Category::UntrackedGrowth, &settled);
}

#[test]
fn fragmentation_growth_objects_grow_along() {
    let scenario = corpus::case("p02").json;
    let reserved: Vec<(u64, Value)> = events(&scenario)
        .iter()
        .filter(|event| event["name"] == "framework_reserved_bytes")
        .map(|event| (ts(event), event["value"].clone()))
        .collect();
    let objects = edited("p02", |mut event, _| {
        if event["name"] == "framework_allocated_bytes" {
            let nearest = reserved.iter().min_by_key(|(ns, _)| ns.abs_diff(ts(&event))).unwrap();
            event["value"] = json!(nearest.1.as_f64().unwrap() * 0.95);
        }
        Some(event)
    });
    takes_away("p02", Category::FragmentationGrowth, &objects);
}

#[test]
fn allocator_cache_all_of_it_is_in_use() {
    let used = edited("d04", |mut event, _| {
        if event["name"] == "framework_allocated_bytes" {
            event["value"] = json!(21_500_000_000_u64);
        }
        Some(event)
    });
    takes_away("d04", Category::AllocatorCache, &used);
}

#[test]
fn pool_retention_given_back_at_once() {
    let trimmed = edited("d20", |event, seconds| {
        let small = json!({"used": 585_105_408, "procs": [{"pid": 76000, "used": 580_911_104, "type": "C"}]});
        let keeps_nothing = json!({"value": 0});
        Some(if seconds > 35.0 { set(event, "nvml_sample", &small) } else { set(event, "pool_attr", &keeps_nothing) })
    });
    takes_away("d20", Category::PoolRetention, &trimmed);
}

#[test]
fn process_churn_few_workers() {
    let few = edited("d17", |event, seconds| (seconds < 11.0 || event["kind"] == "nvml_sample").then_some(event));
    takes_away("d17", Category::ProcessChurn, &few);
}

#[test]
fn stray_context_each_rank_keeps_to_its_device() {
    let own = edited("d16", |mut event, _| {
        let rank = event["tgid"].as_u64().filter(|tgid| *tgid > 72_000);
        if rank.is_some() && event["device"] == 0 {
            return None;
        }
        if event["device"] == 0 && event["kind"] == "nvml_sample" {
            event["procs"].as_array_mut().unwrap().truncate(1);
            event["used"] = json!(5_268_045_824_u64);
        }
        Some(event)
    });
    takes_away("d16", Category::StrayContext, &own);
}

#[test]
fn idle_holder_works_on() {
    let at_work = with("d19", |scenario| {
        let alloc = first(scenario, |event| event["kind"] == "alloc");
        let minutes = (2..40).map(|minute| minute * 60);
        minutes
            .flat_map(|second| {
                let made = json!({"handle": "0xee", "size": 1_048_576});
                let free = json!({"handle": "0xee", "kind": "free", "api": "cuMemFree_v2"});
                [at(alloc.clone(), second, scenario, &made), at(alloc.clone(), second + 1, scenario, &free)]
            })
            .collect()
    });
    takes_away("d19", Category::IdleHolder, &at_work);
}

#[test]
fn managed_memory_allocated_on_the_device() {
    let plain = edited("p03", |mut event, _| {
        if event["api"] == "cuMemAllocManaged" {
            event["api"] = json!("cuMemAlloc_v2");
        }
        Some(event)
    });
    takes_away("p03", Category::ManagedMemory, &plain);
}

#[test]
fn checkpointed_and_stuck_calls_that_succeed_and_fail() {
    let refused = edited("p04", |event, _| Some(set(event, "checkpoint", &json!({"result": 401}))));
    takes_away("p04", Category::Checkpointed, &refused);
    // The first restore works, and is followed by an unlock.
    let restored = edited("p05", |event, seconds| {
        let unlock = json!({"api": "cuCheckpointProcessUnlock", "result": 0});
        match seconds {
            ..220.0 => Some(set(event, "checkpoint", &json!({"result": 0}))),
            ..240.0 => Some(set(event, "checkpoint", &unlock)),
            _ => (event["kind"] != "checkpoint").then_some(event),
        }
    });
    takes_away("p05", Category::CheckpointStuck, &restored);
}

#[test]
fn observer_holds_device_change_succeeds() {
    let done = edited("d25", |event, _| Some(set(event, "admin_event", &json!({"result": "ok"}))));
    takes_away("d25", Category::ObserverHoldsDevice, &done);
}

#[test]
fn coverage_gap_the_library_is_traced() {
    let traced =
        edited("o06", |event, _| Some(set(event, "library_map", &json!({"status": "traced", "reason": null}))));
    let traced = {
        let mut scenario = traced;
        let started = first(&scenario, |event| event["kind"] == "proc_start");
        let call = json!({"kind": "alloc", "lib": "libcuda", "api": "cuMemAlloc_v2", "handle": "0x1", "device": 0,
            "size": 2_700_000_000_u64, "result": 0});
        let call = at(started, 3, &scenario, &call);
        let all = scenario["events"].as_array_mut().unwrap();
        all.push(call);
        all.sort_by_key(ts);
        scenario
    };
    takes_away("o06", Category::CoverageGap, &traced);
}

#[test]
fn insufficient_data_nothing_was_lost() {
    // A block that was freed unseen and made again was in truth freed.
    let complete = edited("d11", |event, seconds| {
        (event["kind"] != "lost_events" && !(seconds < 3.0 && event["kind"] == "alloc" && event["handle"] != "0xB00"))
            .then_some(event)
    });
    takes_away("d11", Category::InsufficientData, &complete);
}

#[test]
fn monitor_degraded_nvml_answers() {
    let answers = edited("o08", |event, _| {
        let slow = event["kind"] == "nvml_sample" && event["status"] != "ok";
        (!slow && event["kind"] != "kmsg").then_some(event)
    });
    takes_away("o08", Category::MonitorDegraded, &answers);
}

#[test]
fn slow_teardown_memory_comes_back_in_time() {
    takes_away("o05", Category::SlowTeardown, &back_in_time("o05", 20.0));
}
