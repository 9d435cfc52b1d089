//! Building the kernel side's object. Shared by the build script and by `cargo xtask build-ebpf`.

use sha2::{Digest as _, Sha256};
use std::{
    env,
    ffi::OsString,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

/// The target the kernel runs.
const TARGET: &str = "bpfel-unknown-none";
/// Debian's and Ubuntu's compiler that comes with a precompiled `core` for BPF.
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
/// Separator of flags in `CARGO_ENCODED_RUSTFLAGS`.
const FLAG_SEPARATOR: &str = "\u{1f}";

/// A compiler and a linker that can make the object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Toolchain {
    /// The compiler.
    pub(crate) compiler: Compiler,
    /// The linker.
    pub(crate) linker: PathBuf,
}

/// Where `core` for BPF comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Compiler {
    /// It is installed beside this compiler.
    Precompiled(PathBuf),
    /// It is compiled with the program by rustup's nightly.
    BuildStd,
}

impl Toolchain {
    /// The toolchain of this machine, if it has one. `tools` is a folder of programs that comes
    /// before the search path.
    pub(crate) fn find(tools: &Path) -> Option<Self> {
        let linker = in_path("bpf-linker", tools)?;
        let debian = PathBuf::from(DEBIAN_RUSTC);
        let compiler = if has_core(&debian) {
            Compiler::Precompiled(debian)
        } else if has_library_source() {
            Compiler::BuildStd
        } else {
            return None;
        };
        Some(Self { compiler, linker })
    }

    /// Compiles the object from the workspace at `root`; its path. `target` is a target folder of
    /// its own: the one of the cargo that may be waiting for this is locked.
    pub(crate) fn build(&self, root: &Path, target: &Path) -> Result<PathBuf, String> {
        let mut command = match &self.compiler {
            Compiler::Precompiled(rustc) => {
                let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
                command.env("RUSTC", rustc);
                command
            }
            Compiler::BuildStd => {
                let mut command = Command::new("rustup");
                command.args(["run", "nightly", "cargo"]).env_remove("RUSTC").env_remove("CARGO");
                command
            }
        };
        command.args(["build", "--release", "--locked", "--quiet", "--package", "tracer-ebpf"]);
        command.args(["--bin", "vramtrace-ebpf", "--features", "kernel", "--target", TARGET]);
        if self.compiler == Compiler::BuildStd {
            command.args(["-Z", "build-std=core"]);
        }
        // The caller's own settings are for another target and another compiler.
        for name in ["RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "CARGO_TARGET_DIR", "CARGO_BUILD_TARGET"]
        {
            command.env_remove(name);
        }
        command.arg("--target-dir").arg(target).current_dir(root);
        command.env("RUSTC_BOOTSTRAP", "1").env("CARGO_ENCODED_RUSTFLAGS", self.flags(root));
        command.env("PATH", path_with(self.linker.parent()));
        let result = command.output().map_err(|error| format!("cannot start {command:?}: {error}"))?;
        if !result.status.success() {
            return Err(format!("{command:?} failed:\n{}", String::from_utf8_lossy(&result.stderr)));
        }
        let object = target.join(TARGET).join("release/vramtrace-ebpf");
        strip(&object);
        Ok(object)
    }

    fn flags(&self, root: &Path) -> String {
        // Paths of this machine would make every machine's object another.
        let cargo_home = env::var_os("CARGO_HOME").map(PathBuf::from);
        let home = || env::var_os("HOME").map(|home| Path::new(&home).join(".cargo"));
        let cargo_home = cargo_home.or_else(home).unwrap_or_default();
        // Sources of packages lie in folders named after where they were downloaded from.
        let downloads = fs::read_dir(cargo_home.join("registry/src")).into_iter().flatten().filter_map(Result::ok);
        let downloads = downloads.map(|folder| format!("--remap-path-prefix={}=/cargo", folder.path().display()));
        let fixed = [
            "-Cdebuginfo=2".to_owned(),
            "-Clink-arg=--btf".to_owned(),
            format!("-Clinker={}", self.linker.display()),
            "--cfg=bpf_target_arch=\"x86_64\"".to_owned(),
            format!("--remap-path-prefix={}=/vramtrace", root.display()),
            format!("--remap-path-prefix={}=/cargo", cargo_home.display()),
        ];
        // Of several prefixes that match the last one counts.
        fixed.into_iter().chain(downloads).collect::<Vec<_>>().join(FLAG_SEPARATOR)
    }
}

/// SHA-256 over everything of ours the object is made of: the kernel side's files with their names,
/// and the locked versions of what it is compiled with. Independent of the order of directory
/// entries.
pub(crate) fn sources_hash(root: &Path) -> io::Result<String> {
    let kernel_side = root.join("tracer-ebpf");
    let mut files = files_below(&kernel_side.join("src"))?;
    files.push(kernel_side.join("Cargo.toml"));
    files.sort();
    let mut hash = Sha256::new();
    for file in files {
        let name = file.strip_prefix(root).unwrap_or(&file).to_string_lossy().into_owned();
        let content = fs::read(&file)?;
        hash.update(format!("{name}\0{}\0", content.len()));
        hash.update(content);
    }
    hash.update(locked_versions(&fs::read_to_string(root.join("Cargo.lock"))?));
    Ok(hex(&hash.finalize()))
}

/// Names and versions of the locked packages that go into the object.
fn locked_versions(lock: &str) -> String {
    let package = |block: &str| {
        let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        let name = field("name = ")?;
        name.starts_with("\"aya-ebpf").then(|| format!("{name} {}\n", field("version = ").unwrap_or_default()))
    };
    lock.split("[[package]]").filter_map(package).collect()
}

fn files_below(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(files_below(&path)?);
        } else {
            files.push(path);
        }
    }
    Ok(files)
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn in_path(program: &str, first: &Path) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    std::iter::once(first.to_owned())
        .chain(env::split_paths(&path))
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
}

fn path_with(first: Option<&Path>) -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = first.map(Path::to_owned).into_iter().chain(env::split_paths(&path));
    env::join_paths(folders).unwrap_or(path)
}

fn has_core(rustc: &Path) -> bool {
    let libraries = output(Command::new(rustc).args(["--print", "target-libdir", "--target", TARGET]));
    let entries = libraries.and_then(fs::read_dir);
    entries.is_ok_and(|mut entries| {
        entries.any(|entry| entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("libcore")))
    })
}

fn has_library_source() -> bool {
    let sysroot = output(Command::new("rustup").args(["run", "nightly", "rustc", "--print", "sysroot"]));
    sysroot.is_ok_and(|sysroot| Path::new(&sysroot).join("lib/rustlib/src/rust/library/core").is_dir())
}

/// Debug information is four fifths of the object and of no use to the kernel, whose own (BTF)
/// stays. Where no LLVM tool is at hand the object is only larger.
fn strip(object: &Path) {
    let debian = PathBuf::from("/usr/lib/llvm-22/bin/llvm-strip");
    let tool = if debian.is_file() { debian } else { "llvm-strip".into() };
    let _ = Command::new(tool).arg("--strip-debug").arg(object).output();
}

fn output(command: &mut Command) -> io::Result<String> {
    let output = command.env_remove("RUSTUP_TOOLCHAIN").output()?;
    if !output.status.success() {
        return Err(io::Error::other(format!("{command:?}: {}", output.status)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_the_sources_follows_content_and_names_only() {
        let root = tempfile::tempdir().unwrap();
        let source = root.path().join("tracer-ebpf/src");
        fs::create_dir_all(source.join("call")).unwrap();
        fs::write(root.path().join("tracer-ebpf/Cargo.toml"), "[package]").unwrap();
        fs::write(root.path().join("Cargo.lock"), LOCK).unwrap();
        let write = |name: &str, content: &str| fs::write(source.join(name), content).unwrap();
        write("main.rs", "a");
        write("call/memory.rs", "b");
        let first = sources_hash(root.path()).unwrap();
        // Written again in another order: the same.
        fs::remove_file(source.join("main.rs")).unwrap();
        write("call/memory.rs", "b");
        write("main.rs", "a");
        assert_eq!(sources_hash(root.path()).unwrap(), first);
        // Content moved from one file to another: not the same.
        write("main.rs", "b");
        write("call/memory.rs", "a");
        assert_ne!(sources_hash(root.path()).unwrap(), first);
    }

    #[test]
    fn only_packages_of_the_object_count() {
        assert_eq!(locked_versions(LOCK), "\"aya-ebpf\" \"0.2.1\"\n\"aya-ebpf-macros\" \"0.2.0\"\n");
    }

    const LOCK: &str = "version = 4\n\n[[package]]\nname = \"aya\"\nversion = \"0.14.0\"\n\n[[package]]\nname = \"aya-ebpf\"\n\
        version = \"0.2.1\"\n\n[[package]]\nname = \"aya-ebpf-macros\"\nversion = \"0.2.0\"\n";
}
