//! Programs that tests ask by HTTP on the loopback interface.

use super::cluster::Cluster;
use crate::rules::root;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::{fs, process::Command};

/// Where the page of a cluster is.
pub fn home(cluster: &Cluster) -> Result<String> {
    let door = fs::read_to_string(cluster.data.join("page.url"))?;
    Ok(door.trim().split("/?").next().context("an address")?.to_owned())
}

/// What the page of a cluster answers to somebody who was let in.
pub fn page(cluster: &Cluster, path: &str) -> Result<(u16, String)> {
    let door = fs::read_to_string(cluster.data.join("page.url"))?;
    let jar = cluster.data.join("jar").display().to_string();
    let curl = |url: &str| -> Result<(u16, String)> {
        let out = Command::new("curl")
            .args(["-sS", "-m", "60", "-b", &jar, "-c", &jar, "-w", "\n%{http_code}", url])
            .output()?;
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let (body, code) = text.rsplit_once('\n').context("curl says a code")?;
        Ok((code.parse()?, body.to_owned()))
    };
    let (code, said) = curl(door.trim())?;
    ensure!(code == 303, "{code} {said}");
    curl(&format!("{}{path}", home(cluster)?))
}

/// All links of all dashboards, with these values for their variables.
pub fn dashboard_links(values: &[(&str, &str)]) -> Result<Vec<String>> {
    let mut all = vec![];
    for file in fs::read_dir(root().join("monitoring/dashboards"))? {
        let text = fs::read_to_string(file?.path())?;
        for url in text.split("\"url\": \"").skip(1).filter_map(|rest| rest.split('"').next()) {
            let url = values.iter().fold(url.to_owned(), |url, (variable, value)| {
                url.replace(&format!("${{{variable}}}"), value)
                    .replace(&format!("${{__data.fields.{variable}}}"), value)
            });
            ensure!(!url.contains('$'), "{url}");
            all.push(url);
        }
    }
    Ok(all)
}

/// Asks one of them.
pub struct Web {
    runtime: tokio::runtime::Runtime,
    client: kube::Client,
}

impl Web {
    /// The program that listens at that URL.
    pub fn new(url: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = {
            let _guard = runtime.enter();
            kube::Client::try_from(kube::Config::new(url.parse()?))?
        };
        Ok(Self { runtime, client })
    }

    /// Its answer, JSON; `None` for what is not there.
    pub fn get(&self, path: &str) -> Result<Option<Value>> {
        let request = http::Request::get(path).body(Vec::new())?;
        match self.runtime.block_on(self.client.request(request)) {
            Ok(answer) => Ok(Some(answer)),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}
