//! Which allocator stands behind a process's driver calls, by what it asks the driver for.
//!
//! The driver sees segments, not objects. What the segments of an allocator look like is set by
//! its source, so they can be recognised; what is in them cannot be told from outside.

use crate::ledger::Process;
use crate::ledger::books::Books;
use crate::ledger::classes::Likeness;
use crate::units::MIB;
use tracer_ebpf::Family;

/// An allocator that is known by its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Allocator {
    /// PyTorch's caching allocator: segments of 2 and 20 MiB and of larger multiples of 2 MiB.
    PyTorch,
    /// The same with expandable segments: physical handles of 2 or 20 MiB mapped one by one.
    PyTorchExpandable,
    /// `cudaMallocAsync` pools of the driver.
    Pool,
    /// TensorFlow's BFC arena with growth allowed: regions that double.
    TensorFlow,
    /// One block of most of the device: JAX, TensorFlow or a KV pool take it at the start.
    Preallocation,
    /// A server of language models, by its name: weights and a KV pool of fixed size.
    LanguageModelServer,
}

/// Granule of PyTorch's segments and small pool (`kSmallBuffer`).
const SMALL: u64 = 2 * MIB;
/// Segments for requests up to 10 MiB (`kLargeBuffer`).
const LARGE: u64 = 20 * MIB;

impl Allocator {
    /// Recognises the allocator of a process on a device of `total` bytes.
    pub(super) fn of(process: &Process, total: Option<u64>) -> Option<Self> {
        let books = process.books.as_deref()?;
        let comm = process.comm.to_ascii_lowercase();
        if ["vllm", "sglang", "trtllm", "tensorrt"].iter().any(|name| comm.contains(name)) {
            return Some(Self::LanguageModelServer);
        }
        Self::by_segments(books, total)
    }

    fn by_segments(books: &Books, total: Option<u64>) -> Option<Self> {
        let classes = books.by_size.with_survivors(1);
        let device: Vec<(u64, u64, Option<Family>)> = classes
            .iter()
            .filter(|(key, _)| !key.host)
            .filter_map(|(key, class)| match key.likeness {
                Likeness::Size { size, .. } => Some((size, class.live.count, class.family)),
                _ => None,
            })
            .collect();
        let of_family = |family| device.iter().filter(move |(_, _, of)| *of == Some(family));
        let bytes = |items: &mut dyn Iterator<Item = &(u64, u64, Option<Family>)>| {
            items.fold(0_u64, |sum, (size, live, _)| sum.saturating_add(size.saturating_mul(*live)))
        };
        let all = bytes(&mut device.iter());
        let most = |part: u64| part.saturating_mul(2) > all;
        if all == 0 {
            return None;
        }
        if most(bytes(&mut of_family(Family::Pool))) {
            return Some(Self::Pool);
        }
        let handles = of_family(Family::Vmm).filter(|(size, ..)| *size == SMALL || *size == LARGE);
        if most(bytes(&mut handles.clone())) && handles.map(|(_, live, _)| live).sum::<u64>() >= 4 {
            return Some(Self::PyTorchExpandable);
        }
        if let Some(total) = total
            && device.iter().any(|(size, live, _)| *live == 1 && *size > total / 2)
        {
            return Some(Self::Preallocation);
        }
        let blocks: Vec<u64> = of_family(Family::Device).map(|(size, ..)| *size).collect();
        let segments = blocks.iter().all(|size| size.is_multiple_of(SMALL));
        if segments && blocks.len() >= 2 && (blocks.contains(&SMALL) || blocks.contains(&LARGE)) {
            return Some(Self::PyTorch);
        }
        let mut regions: Vec<u64> = blocks.iter().copied().filter(|size| *size >= MIB).collect();
        regions.sort_unstable();
        let doubling = regions.windows(2).all(|pair| pair[1] == pair[0].saturating_mul(2));
        (regions.len() >= 3 && doubling).then_some(Self::TensorFlow)
    }

    /// What it is, and what it shows.
    pub(super) fn told(self) -> &'static str {
        match self {
            Self::PyTorch => {
                "its blocks look like segments of PyTorch's caching allocator (multiples of 2 MiB, 2 and 20 MiB for small requests); what is free inside them cannot be told from outside"
            }
            Self::PyTorchExpandable => {
                "its blocks look like PyTorch's expandable segments (physical handles of 2 or 20 MiB); what is free inside them cannot be told from outside"
            }
            Self::Pool => {
                "most of it is stream-ordered (cudaMallocAsync): what its pools keep beyond that cannot be told from calls"
            }
            Self::TensorFlow => {
                "its regions double, as TensorFlow's BFC arena does with growth allowed; what is free inside them cannot be told from outside"
            }
            Self::Preallocation => {
                "one block takes most of the device, as JAX, TensorFlow and KV pools do at the start; what is used of it cannot be told from outside"
            }
            Self::LanguageModelServer => {
                "its name is a language-model server's: it takes weights and a KV pool of fixed size at the start; how full the pool is only its metrics tell"
            }
        }
    }

    /// The lever that gives memory back or bounds it.
    pub(super) fn lever(self) -> &'static str {
        match self {
            Self::PyTorch => {
                "torch.cuda.empty_cache() gives the free segments back; PYTORCH_CUDA_ALLOC_CONF with expandable_segments:True or max_split_size_mb bounds what cannot be given back"
            }
            Self::PyTorchExpandable => {
                "torch.cuda.empty_cache() gives free pages back; torch.cuda.set_per_process_memory_fraction bounds the rest"
            }
            Self::Pool => "trim the pool (cudaMemPoolTrimTo) or set a finite release threshold",
            Self::TensorFlow => {
                "set a memory limit for the logical device, or leave allow_growth off and give it a fixed share; bound tf.data's prefetch and cache"
            }
            Self::Preallocation => {
                "bound it at the start: XLA_PYTHON_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_PREALLOCATE=false for JAX, allow_growth or a memory limit for TensorFlow"
            }
            Self::LanguageModelServer => {
                "bound it at the start: gpu_memory_utilization, max_num_seqs and max_model_len for vLLM, mem_fraction_static for SGLang"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Allocator;
    use crate::engine::{Engine, EngineConfig};
    use crate::record::Identity;
    use crate::units::{GIB, MIB};
    use serde_json::json;

    fn recognised(comm: &str, blocks: &[(&str, u64)]) -> Option<Allocator> {
        let mut engine = Engine::new(EngineConfig::default());
        for (index, (api, size)) in blocks.iter().enumerate() {
            let record = json!({"ts_ns": index, "kind": "alloc", "pid": 1, "tgid": 1, "start_ns": 1, "comm": comm,
                "lib": "libcuda", "api": api, "handle": format!("h{index}"), "size": size, "device": 0, "result": 0});
            engine.push(&serde_json::from_value(record).unwrap());
        }
        let process = engine.ledger().process(&Identity { tgid: 1, start_ns: 1 }).unwrap();
        Allocator::of(process, Some(80 * GIB))
    }

    #[test]
    fn each_allocator_by_its_segments() {
        let plain =
            |sizes: &[u64]| -> Vec<(&str, u64)> { sizes.iter().map(|&size| ("cuMemAlloc_v2", size * MIB)).collect() };
        assert_eq!(recognised("python", &plain(&[2, 20, 20, 512, 1024])), Some(Allocator::PyTorch));
        assert_eq!(recognised("python", &plain(&[256, 512, 1024, 2048])), Some(Allocator::TensorFlow));
        assert_eq!(recognised("python", &plain(&[60 * 1024])), Some(Allocator::Preallocation));
        assert_eq!(recognised("python", &[("cuMemCreate", 20 * MIB); 6]), Some(Allocator::PyTorchExpandable));
        assert_eq!(recognised("python", &[("cuMemAllocAsync", 100 * MIB); 2]), Some(Allocator::Pool));
        assert_eq!(recognised("VLLM::EngineCor", &plain(&[300])), Some(Allocator::LanguageModelServer));
        assert_eq!(recognised("solver", &plain(&[3, 700])), None);
    }
}
