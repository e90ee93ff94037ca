//! Programs that tests ask by HTTP on the loopback interface.

use anyhow::Result;
use serde_json::Value;

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
