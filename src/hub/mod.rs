//! Models from the Hugging Face hub, in the hub's own cache, which other tools share.
//!
//! Invariant: what is returned is complete and of one commit. A file that ends early stays as a part that the next try goes on
//! with; without a network, or told so, only the cache is used. Nothing reads the environment: `Hub` says it all. The wire and
//! the cache's layout are the crate hf-hub's; which files make a model is `choose`'s matter.

mod choose;
mod name;

use std::fs;
use std::path::{Path, PathBuf};

use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use thiserror::Error;

use choose::{Choice, INDEX, choose, weights};
pub use name::HubName;

/// Hears how far the download of a file is: `(file, done_bytes, total_bytes)`.
pub type Fetched<'a> = &'a mut dyn FnMut(&str, u64, u64);

/// Where models come from and where they are kept.
#[derive(Clone, Debug)]
pub struct Hub {
    /// Address of the hub, without a slash at the end; `None` is the public one.
    pub endpoint: Option<String>,
    /// The hub's cache.
    pub cache_dir: PathBuf,
    /// Sent with every request to the hub.
    pub token: Option<String>,
    /// Whether only the cache is used, and why, for messages.
    pub offline: Option<String>,
}

/// Why there is no model.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum HubError {
    /// The repository has no such model, or several.
    #[error("{name} {problem}{}", listed(candidates))]
    Choose { name: Box<HubName>, problem: String, candidates: Vec<String> },
    /// The cache has no such model, and the hub is out of reach.
    #[error("{name}: {why}, and the cache at {} does not have it ({problem}); run `kittiwake pull {name}` where there is a network", cache.display())]
    NotCached { name: Box<HubName>, cache: PathBuf, why: String, problem: String },
    /// The hub said no.
    #[error("{name}: the hub answers {status}: {advice}")]
    Refused { name: Box<HubName>, status: u16, advice: String },
    /// The hub did not answer.
    #[error("{name}: the hub cannot be reached: {problem}")]
    Unreachable { name: Box<HubName>, problem: String },
    /// A file ended early, again and again.
    #[error("{name}: '{file}' ended after {got} of {expected} bytes ({problem}); the next try goes on from there")]
    Truncated { name: Box<HubName>, file: String, expected: u64, got: u64, problem: String },
    /// The hub's answer makes no sense.
    #[error("{name}: {problem}")]
    Answer { name: Box<HubName>, problem: String },
    /// The cache cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
}

/// At most so many names in a message.
const MAX_LISTED: usize = 40;

fn listed(candidates: &[String]) -> String {
    let shown = candidates[..candidates.len().min(MAX_LISTED)].join(", ");
    match candidates.len() {
        0 => String::new(),
        n if n > MAX_LISTED => format!("; there are {n} files: {shown}, …"),
        _ => format!("; there are: {shown}"),
    }
}

/// A revision's files.
#[derive(serde::Deserialize)]
struct Listing {
    #[serde(rename = "sha")]
    commit: String,
    siblings: Vec<Sibling>,
}

#[derive(serde::Deserialize)]
struct Sibling {
    rfilename: String,
}

/// Tries for one file; each goes on where the one before has ended, and one that brings nothing is the last.
const MAX_TRIES: u32 = 5;

impl Hub {
    /// Finds a model in the cache, or fetches it: the path of its directory, or of its (first) GGUF file.
    ///
    /// # Errors
    /// See `HubError`.
    pub fn fetch(&self, name: &HubName, progress: Fetched<'_>) -> Result<PathBuf, HubError> {
        if let Some(why) = &self.offline {
            return self.cached(name, why);
        }
        let api = self.api(name)?;
        let listing = match self.listing(&api, name) {
            Err(HubError::Unreachable { problem, .. }) => {
                let path = self.cached(name, &format!("the hub cannot be reached ({problem})"))?;
                tracing::warn!("{name}: the hub cannot be reached ({problem}); the copy in the cache is used");
                return Ok(path);
            }
            listing => listing?,
        };
        let repo = Repo::with_revision(name.repo.clone(), RepoType::Model, listing.commit.clone());
        let mut fetching =
            Fetching { hub: self, name, api: &api, repo: api.repo(repo), commit: &listing.commit, progress };
        let files: Vec<String> = listing.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        let snapshot = fetching.snapshot();
        let path = match choose(name, &files)? {
            Choice::Gguf(parts) => {
                parts.iter().try_for_each(|part| fetching.file(part))?;
                snapshot.join(&parts[0])
            }
            Choice::Directory(parts) => {
                parts.iter().try_for_each(|part| fetching.file(part))?;
                let index = read_index(&snapshot, &parts)?;
                weights(name, &files, index.as_deref())?.iter().try_for_each(|shard| fetching.file(shard))?;
                snapshot
            }
        };
        let reference = self.cache(&name.revision, name);
        reference.create_ref(&listing.commit).map_err(|source| HubError::Io { path: self.folder(name), source })?;
        Ok(path)
    }

    fn api(&self, name: &HubName) -> Result<Api, HubError> {
        let mut builder = ApiBuilder::from_cache(Cache::new(self.cache_dir.clone()))
            .with_token(self.token.clone())
            .with_user_agent("kittiwake", env!("CARGO_PKG_VERSION"));
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.trim_end_matches('/').into());
        }
        builder.build().map_err(|error| HubError::Answer { name: Box::new(name.clone()), problem: error.to_string() })
    }

    fn cache(&self, revision: &str, name: &HubName) -> hf_hub::CacheRepo {
        let repo = Repo::with_revision(name.repo.clone(), RepoType::Model, revision.into());
        Cache::new(self.cache_dir.clone()).repo(repo)
    }

    /// The repository's folder in the cache.
    fn folder(&self, name: &HubName) -> PathBuf {
        self.cache_dir.join(Repo::model(name.repo.clone()).folder_name())
    }

    fn listing(&self, api: &Api, name: &HubName) -> Result<Listing, HubError> {
        let repo = Repo::with_revision(name.repo.clone(), RepoType::Model, name.revision.clone());
        let request = api.repo(repo).info_request().config().http_status_as_error(false).build();
        let mut answer = request
            .call()
            .map_err(|error| HubError::Unreachable { name: Box::new(name.clone()), problem: error.to_string() })?;
        let status = answer.status().as_u16();
        if status != 200 {
            let code = answer.headers().get("x-error-code").and_then(|code| code.to_str().ok());
            return Err(self.refused(name, status, code));
        }
        let malformed = |problem: String| HubError::Answer { name: Box::new(name.clone()), problem };
        let listing: Listing = answer
            .body_mut()
            .read_json()
            .map_err(|error| malformed(format!("the hub's list of files cannot be read: {error}")))?;
        if !listing.commit.chars().all(|c| c.is_ascii_hexdigit()) || listing.commit.is_empty() {
            return Err(malformed(format!("'{}' is no commit", listing.commit)));
        }
        // Names become paths.
        let siblings = listing.siblings.into_iter().filter(|sibling| name::is_path(&sibling.rfilename)).collect();
        Ok(Listing { siblings, ..listing })
    }

    fn refused(&self, name: &HubName, status: u16, code: Option<&str>) -> HubError {
        let advice = match (status, code, &self.token) {
            (404, Some("RevisionNotFound"), _) => format!("it has no revision '{}'", name.revision),
            (401 | 404, _, None) => {
                "there is no such repository, or it needs a token that may read it: set HF_TOKEN, or log in with the hub's \
                 own tool"
                    .into()
            }
            (401 | 404, _, Some(_)) => "there is no such repository, or the token may not read it".into(),
            (403, ..) => "access must be granted first: ask for it on the model's page, then set HF_TOKEN".into(),
            (429, ..) => "too many requests; try again later".into(),
            _ => "try again later".into(),
        };
        HubError::Refused { name: Box::new(name.clone()), status, advice }
    }

    /// What the cache has.
    fn cached(&self, name: &HubName, why: &str) -> Result<PathBuf, HubError> {
        let absent = |problem: String| HubError::NotCached {
            name: Box::new(name.clone()),
            cache: self.cache_dir.clone(),
            why: why.into(),
            problem,
        };
        let folder = self.folder(name);
        let reference = folder.join("refs").join(&name.revision);
        let commit = match fs::read_to_string(&reference) {
            Ok(commit) => commit.trim().to_owned(),
            Err(_) => name.revision.clone(),
        };
        let snapshot = folder.join("snapshots").join(&commit);
        let mut files = Vec::new();
        list(&snapshot, "", &mut files);
        if files.is_empty() {
            return Err(absent(format!("nothing of revision '{}'", name.revision)));
        }
        let incomplete = |error: HubError| match error {
            HubError::Choose { problem, candidates, .. } => absent(format!("it {problem}{}", listed(&candidates))),
            error => error,
        };
        match choose(name, &files).map_err(incomplete)? {
            Choice::Gguf(parts) => Ok(snapshot.join(&parts[0])),
            Choice::Directory(parts) => {
                let index = read_index(&snapshot, &parts)?;
                weights(name, &files, index.as_deref()).map_err(incomplete)?;
                Ok(snapshot)
            }
        }
    }
}

/// The index of shards, if it is among the files.
fn read_index(snapshot: &Path, files: &[String]) -> Result<Option<Vec<u8>>, HubError> {
    if !files.iter().any(|file| file == INDEX) {
        return Ok(None);
    }
    let path = snapshot.join(INDEX);
    fs::read(&path).map(Some).map_err(|source| HubError::Io { path, source })
}

/// Names of all files below a folder; a link counts if what it leads to is there.
fn list(folder: &Path, prefix: &str, files: &mut Vec<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), format!("{prefix}{}", entry.file_name().to_string_lossy()));
        if path.is_dir() {
            list(&path, &format!("{name}/"), files);
        } else if path.is_file() {
            files.push(name);
        }
    }
}

/// One model on its way.
struct Fetching<'a> {
    hub: &'a Hub,
    name: &'a HubName,
    api: &'a Api,
    repo: ApiRepo,
    commit: &'a str,
    progress: Fetched<'a>,
}

impl Fetching<'_> {
    fn snapshot(&self) -> PathBuf {
        self.hub.folder(self.name).join("snapshots").join(self.commit)
    }

    /// Makes a file be there, whole.
    fn file(&mut self, file: &str) -> Result<(), HubError> {
        if self.snapshot().join(file).is_file() {
            return Ok(());
        }
        let url = self.repo.url(file);
        let metadata = self.api.metadata(&url).map_err(|error| self.problem(file, error))?;
        let (etag, expected) = (metadata.etag(), metadata.size() as u64);
        if metadata.commit_hash() != self.commit || !name::is_path(etag) || etag.contains('/') {
            let problem = format!("'{file}' comes as '{etag}' of commit '{}'", metadata.commit_hash());
            return Err(HubError::Answer { name: Box::new(self.name.clone()), problem });
        }
        let blob = self.hub.cache(self.commit, self.name).blob_path(etag);
        let part = blob.with_extension("part");
        let mut tries = 0;
        loop {
            tries += 1;
            let before = len_of(&part);
            if before >= expected {
                // More, or all of it and yet no file: of another life. Begin anew.
                fs::remove_file(&part).map_err(|source| HubError::Io { path: part.clone(), source })?;
            }
            let watcher = Watcher { progress: &mut *self.progress, file, done_bytes: 0, total_bytes: expected };
            let error = match self.repo.download_with_progress(file, watcher) {
                Ok(_) if len_of(&blob) == expected => return Ok(()),
                Ok(pointer) => {
                    // Not whole after all: back to what it was.
                    let _ = fs::remove_file(pointer);
                    fs::rename(&blob, &part).map_err(|source| HubError::Io { path: blob.clone(), source })?;
                    None
                }
                Err(error) => Some(error),
            };
            let got = len_of(&part);
            let has_grown = got > before && got < expected;
            if has_grown && tries < MAX_TRIES {
                continue;
            }
            return Err(match error {
                Some(error @ (ApiError::RequestError(_) | ApiError::LockAcquisition(_))) => self.problem(file, error),
                error => HubError::Truncated {
                    name: Box::new(self.name.clone()),
                    file: file.into(),
                    expected,
                    got,
                    problem: error.map_or("the connection was closed".into(), |error| error.to_string()),
                },
            });
        }
    }

    fn problem(&self, file: &str, error: ApiError) -> HubError {
        let name = Box::new(self.name.clone());
        match error {
            ApiError::RequestError(error) => match *error {
                ureq::Error::StatusCode(status) => self.hub.refused(self.name, status, None),
                error => HubError::Unreachable { name, problem: format!("'{file}': {error}") },
            },
            ApiError::LockAcquisition(path) => {
                let problem = format!("another process is fetching '{file}' ({})", path.display());
                HubError::Answer { name, problem }
            }
            error => HubError::Answer { name, problem: format!("'{file}': {error}") },
        }
    }
}

fn len_of(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// Passes on how far one file is.
struct Watcher<'a> {
    progress: Fetched<'a>,
    file: &'a str,
    done_bytes: u64,
    total_bytes: u64,
}

impl Progress for Watcher<'_> {
    fn init(&mut self, _size: usize, _filename: &str) {
        self.done_bytes = 0;
    }

    fn update(&mut self, size: usize) {
        self.done_bytes += size as u64;
        (self.progress)(self.file, self.done_bytes, self.total_bytes);
    }

    fn finish(&mut self) {}
}
