//! Flags of the hub, and what the hub's own conventions say about them.
//!
//! Invariant: the variables that the hub's tools know (HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_TOKEN_PATH, HF_HUB_OFFLINE,
//! HF_ENDPOINT) are defaults of flags like any other, found here by `args::parse`, so that each can be set in every layer.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use kittiwake::hub::Hub;

use super::args::Environment;

/// Where models come from that are named as `org/name`.
#[derive(Debug, Args)]
pub struct HubArgs {
    /// Where models of the hub are kept [default: $HF_HUB_CACHE, $HF_HOME/hub, or huggingface/hub in the user's cache directory].
    #[arg(long, value_name = "DIR")]
    hf_cache_dir: Option<PathBuf>,
    /// Address of the hub [default: $HF_ENDPOINT, or the public one].
    #[arg(long, value_name = "URL")]
    hf_endpoint: Option<String>,
    /// Token for models that are not public [default: $HF_TOKEN, or the file that the hub's login tool writes].
    #[arg(long, value_name = "TOKEN")]
    hf_token: Option<String>,
    /// Use the cache only [default: $HF_HUB_OFFLINE].
    #[arg(long)]
    hf_offline: bool,
}

impl HubArgs {
    /// # Errors
    /// There is no place for a cache.
    pub fn hub(&self) -> anyhow::Result<Hub> {
        let no_place =
            || anyhow::anyhow!("--hf-cache-dir: there is no home directory to keep models in; name a directory");
        Ok(Hub {
            endpoint: self.hf_endpoint.clone(),
            cache_dir: self.hf_cache_dir.clone().ok_or_else(no_place)?,
            token: self.hf_token.clone(),
            offline: self.hf_offline.then(|| "--hf-offline (HF_HUB_OFFLINE) is set".into()),
        })
    }
}

/// Values for the flags above from the environment that the hub's own tools read.
pub fn found(environment: Environment) -> Vec<(&'static str, OsString)> {
    let of = |name: &str| environment(name).filter(|value| !value.is_empty());
    let cache = || of("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(PathBuf::from(of("HOME")?).join(".cache")));
    let home = of("HF_HOME").map(PathBuf::from).or_else(|| Some(cache()?.join("huggingface")));
    let cache_dir = of("HF_HUB_CACHE").or_else(|| Some(home.as_ref()?.join("hub").into_os_string()));
    let token_file = of("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home.as_ref()?.join("token")));
    let stored =
        || Some(std::fs::read_to_string(token_file?).ok()?.trim().to_owned()).filter(|token| !token.is_empty());
    let token = of("HF_TOKEN").or_else(|| stored().map(OsString::from));
    let is_set =
        |value: &OsString| matches!(value.to_string_lossy().to_lowercase().as_str(), "1" | "on" | "yes" | "true");
    let offline = of("HF_HUB_OFFLINE").filter(is_set).map(|_| "true".into());
    let all =
        [("hf-cache-dir", cache_dir), ("hf-endpoint", of("HF_ENDPOINT")), ("hf-token", token), ("hf-offline", offline)];
    all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hubs_variables_are_found() {
        let all = |set: &[(&str, &str)]| {
            let lookup = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
            found(&lookup).into_iter().map(|(name, value)| format!("{name}={}", value.display())).collect::<Vec<_>>()
        };
        assert_eq!(all(&[]), Vec::<String>::new());
        assert_eq!(all(&[("HOME", "/h")]), ["hf-cache-dir=/h/.cache/huggingface/hub"]);
        assert_eq!(all(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), ["hf-cache-dir=/x/huggingface/hub"]);
        assert_eq!(all(&[("HF_HOME", "/f"), ("HF_HUB_OFFLINE", "0")]), ["hf-cache-dir=/f/hub"]);
        let set = [("HF_HUB_CACHE", "/c"), ("HF_TOKEN", "t"), ("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://e")];
        assert_eq!(all(&set), ["hf-cache-dir=/c", "hf-endpoint=http://e", "hf-token=t", "hf-offline=true"]);
    }
}
