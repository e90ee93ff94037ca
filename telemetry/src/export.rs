//! Where spans go and which of them: the standard variables of OpenTelemetry, read once.
//!
//! `OTEL_EXPORTER_OTLP_ENDPOINT` (or the option of the same meaning), `_PROTOCOL` (`grpc` or `http/protobuf`), `_HEADERS`, `_TIMEOUT`,
//! `_CERTIFICATE`, `_CLIENT_CERTIFICATE`, `_CLIENT_KEY`, each with `_TRACES_` before the last word for traces alone, and
//! `OTEL_TRACES_SAMPLER` with its `_ARG`. What cannot be followed is refused by name.

use crate::{Error, TraceContext};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig, WithTonicConfig};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

/// An export that takes longer has failed, unless a variable says otherwise.
const PATIENCE: Duration = Duration::from_secs(5);
/// What connecting may take of it.
const CONNECT: Duration = Duration::from_secs(3);
/// Bytes of a collector's answer.
const ANSWER: usize = 64 << 10;

/// Which traces are told, where nobody has decided it before.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rate {
    All,
    None,
    /// This part of all, by their ids, so that every process decides alike.
    Part(f64),
}

/// Which spans are told. What failed is told in any case, unless none are wanted at all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sampler {
    /// Who began a trace has decided about the whole.
    follows: bool,
    rate: Rate,
}

impl Default for Sampler {
    fn default() -> Self {
        Self { follows: true, rate: Rate::All }
    }
}

impl Sampler {
    fn parse(name: &str, argument: Option<&str>) -> Result<Self, String> {
        let (follows, root) = match name.strip_prefix("parentbased_") {
            Some(root) => (true, root),
            None => (false, name),
        };
        let rate = match root {
            "always_on" => Rate::All,
            "always_off" => Rate::None,
            "traceidratio" => {
                let argument = argument.unwrap_or("1");
                let part = argument.parse().ok().filter(|part| (0.0..=1.0).contains(part));
                Rate::Part(
                    part.ok_or_else(|| format!("{SAMPLER_ARGUMENT}={argument}: a number from 0 to 1 is wanted"))?,
                )
            }
            _ => {
                return Err(format!(
                    "{SAMPLER}={name}: always_on, always_off and traceidratio are there, each also after parentbased_"
                ));
            }
        };
        Ok(Self { follows, rate })
    }

    /// Whether a trace that begins here is told.
    pub fn begins(self, trace_id: &[u8; 16]) -> bool {
        match self.rate {
            Rate::All => true,
            Rate::None => false,
            Rate::Part(part) => {
                let [.., a, b, c, d, e, f, g] = *trace_id;
                let random = u64::from_be_bytes([0, a, b, c, d, e, f, g]);
                (random as f64) < part * (1_u64 << 56) as f64
            }
        }
    }

    /// Whether a span of that trace is told.
    pub fn takes(self, context: &TraceContext) -> bool {
        if self.follows { context.sampled } else { self.begins(&context.trace_id) }
    }

    /// Whether failures are told that it does not take.
    pub fn tells_failures(self) -> bool {
        self.rate != Rate::None
    }
}

const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARGUMENT: &str = "OTEL_TRACES_SAMPLER_ARG";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protocol {
    Grpc,
    Http,
}

/// A collector, and how to speak to it.
#[derive(Clone)]
pub(crate) struct Target {
    /// With scheme; of HTTP with the path.
    endpoint: String,
    protocol: Protocol,
    timeout: Duration,
    authority: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
    /// Where connections really go.
    via: Option<SocketAddr>,
}

/// All that the environment and the options say.
pub(crate) struct Settings {
    pub target: Option<Target>,
    pub sampler: Sampler,
}

impl Settings {
    /// Reads them. `option` is an endpoint that counts more than the environment's.
    pub fn read(
        option: Option<&str>,
        via: Option<SocketAddr>,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, Error> {
        let variable = |name: &str| environment(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        let of = |what: &str| {
            let own = format!("OTEL_EXPORTER_OTLP_TRACES_{what}");
            let all = format!("OTEL_EXPORTER_OTLP_{what}");
            variable(&own).map(|v| (v, own)).or_else(|| variable(&all).map(|v| (v, all)))
        };
        let sampler = match variable(SAMPLER) {
            Some(name) => Sampler::parse(&name, variable(SAMPLER_ARGUMENT).as_deref()).map_err(Error::Setting)?,
            None => Sampler::default(),
        };
        let off = variable("OTEL_SDK_DISABLED").is_some_and(|v| v.eq_ignore_ascii_case("true"))
            || variable("OTEL_TRACES_EXPORTER").is_some_and(|v| v == "none");
        // An option that only repeats the variable for all signals is none.
        let option = option.filter(|o| !o.is_empty() && variable("OTEL_EXPORTER_OTLP_ENDPOINT").as_deref() != Some(*o));
        let (endpoint, whole) = match (option, of("ENDPOINT")) {
            (Some(option), _) => (option.to_owned(), false),
            (None, Some((endpoint, name))) => (endpoint, name.contains("TRACES")),
            (None, None) => return Ok(Self { target: None, sampler }),
        };
        if off {
            return Ok(Self { target: None, sampler });
        }
        let protocol = match of("PROTOCOL") {
            None => Protocol::Grpc,
            Some((p, _)) if p == "grpc" => Protocol::Grpc,
            Some((p, _)) if p == "http/protobuf" => Protocol::Http,
            Some((p, name)) => {
                return Err(Error::Setting(format!("{name}={p}: grpc and http/protobuf are there")));
            }
        };
        let mut endpoint = endpoint.trim_end_matches('/').to_owned();
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            return Err(Error::Setting(format!("the collector {endpoint} is to begin with http:// or https://")));
        }
        if protocol == Protocol::Http && !whole {
            endpoint += "/v1/traces";
        }
        let timeout = match of("TIMEOUT") {
            None => PATIENCE,
            Some((text, name)) => {
                let millis = text.parse().ok().filter(|ms| (1..=60_000).contains(ms));
                Duration::from_millis(millis.ok_or_else(|| {
                    Error::Setting(format!("{name}={text}: a number of milliseconds up to 60000 is wanted"))
                })?)
            }
        };
        let file = |what: &str| match of(what) {
            None => Ok(None),
            Some((path, name)) => std::fs::read(&path)
                .map(Some)
                .map_err(|source| Error::SettingFile { what: format!("{name}={path}"), source }),
        };
        let identity = match (file("CLIENT_CERTIFICATE")?, file("CLIENT_KEY")?) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => {
                let both = "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and OTEL_EXPORTER_OTLP_CLIENT_KEY belong together";
                return Err(Error::Setting(both.into()));
            }
        };
        let authority = file("CERTIFICATE")?;
        Ok(Self { target: Some(Target { endpoint, protocol, timeout, authority, identity, via }), sampler })
    }
}

impl Target {
    /// Makes what sends spans there; connections are made when they are needed. Headers are read from the environment here.
    pub fn exporter(&self) -> Result<SpanExporter, Error> {
        let failed = |e| Error::Exporter(self.endpoint.clone(), e);
        match self.protocol {
            Protocol::Grpc => SpanExporter::builder()
                .with_tonic()
                .with_timeout(self.timeout)
                .with_channel(self.channel()?)
                .build()
                .map_err(failed),
            Protocol::Http => SpanExporter::builder()
                .with_http()
                .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
                .with_endpoint(&self.endpoint)
                .with_timeout(self.timeout)
                .with_http_client(self.http()?)
                .build()
                .map_err(failed),
        }
    }

    /// Its host and port.
    pub fn place(&self) -> Result<(String, u16), Error> {
        let uri: http::Uri = self.endpoint.parse().map_err(|e| self.wrong(&e))?;
        let host = uri.host().ok_or_else(|| self.wrong(&"there is no host in it"))?;
        let standard = if self.is_tls() { 443 } else { 80 };
        Ok((host.to_owned(), uri.port_u16().unwrap_or(standard)))
    }

    fn is_tls(&self) -> bool {
        self.endpoint.starts_with("https://")
    }

    fn wrong(&self, why: &dyn std::fmt::Display) -> Error {
        Error::Setting(format!("the collector {}: {why}", self.endpoint))
    }

    fn channel(&self) -> Result<tonic::transport::Channel, Error> {
        let endpoint = Endpoint::from_shared(self.endpoint.clone()).map_err(|e| self.wrong(&e))?;
        let mut endpoint = endpoint.timeout(self.timeout).connect_timeout(CONNECT.min(self.timeout));
        if self.is_tls() {
            let mut tls = match &self.authority {
                Some(authority) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority)),
                None => ClientTlsConfig::new().with_native_roots(),
            };
            if let Some((certificate, key)) = &self.identity {
                tls = tls.identity(Identity::from_pem(certificate, key));
            }
            endpoint = endpoint.tls_config(tls).map_err(|e| self.wrong(&e))?;
        }
        Ok(match self.via {
            None => endpoint.connect_lazy(),
            Some(via) => endpoint.connect_with_connector_lazy(tower::service_fn(move |_: http::Uri| async move {
                tokio::net::TcpStream::connect(via).await.map(hyper_util::rt::TokioIo::new)
            })),
        })
    }

    fn http(&self) -> Result<Http, Error> {
        use hyper_util::client::legacy::{Client, connect::HttpConnector};
        let builder = hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(self.tls()?).https_or_http();
        let via = self.via;
        // A name means one place alone where connections go somewhere else.
        let resolver = tower::service_fn(move |name: hyper_util::client::legacy::connect::dns::Name| async move {
            match via {
                Some(via) => Ok(vec![SocketAddr::new(via.ip(), 0)].into_iter()),
                None => tokio::net::lookup_host((name.as_str(), 0))
                    .await
                    .map(|all| all.collect::<Vec<SocketAddr>>().into_iter()),
            }
        });
        let mut connector = HttpConnector::new_with_resolver(resolver);
        connector.enforce_http(false);
        connector.set_connect_timeout(Some(CONNECT.min(self.timeout)));
        let connector = builder.enable_http1().wrap_connector(connector);
        let client: Client<_, http_body_util::Full<Bytes>> =
            Client::builder(hyper_util::rt::TokioExecutor::new()).pool_max_idle_per_host(1).build(connector);
        let client = Arc::new(client);
        let send: Send = Arc::new(move |request| {
            let client = client.clone();
            Box::pin(async move {
                let answer = client.request(request).await?;
                let (head, body) = answer.into_parts();
                let body = http_body_util::BodyExt::collect(http_body_util::Limited::new(body, ANSWER)).await?;
                Ok(Response::from_parts(head, body.to_bytes()))
            })
        });
        let runtime = tokio::runtime::Handle::try_current().map_err(|e| self.wrong(&e))?;
        Ok(Http { send, runtime, timeout: self.timeout })
    }

    fn tls(&self) -> Result<rustls::ClientConfig, Error> {
        use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
        let mut roots = rustls::RootCertStore::empty();
        match &self.authority {
            Some(pem) => {
                for certificate in CertificateDer::pem_slice_iter(pem) {
                    let certificate = certificate.map_err(|e| self.wrong(&e))?;
                    roots.add(certificate).map_err(|e| self.wrong(&e))?;
                }
            }
            None if self.is_tls() => {
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
            None => {}
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| self.wrong(&e))?
            .with_root_certificates(roots);
        match &self.identity {
            None => Ok(builder.with_no_client_auth()),
            Some((certificate, key)) => {
                let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate).collect();
                let chain = chain.map_err(|e| self.wrong(&e))?;
                let key = PrivateKeyDer::from_pem_slice(key).map_err(|e| self.wrong(&e))?;
                builder.with_client_auth_cert(chain, key).map_err(|e| self.wrong(&e))
            }
        }
    }
}

type Answered = std::pin::Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + std::marker::Send>>;
type Send = Arc<dyn Fn(Request<http_body_util::Full<Bytes>>) -> Answered + std::marker::Send + Sync>;

/// A client that also works for the exporter's thread, which is none of the runtime's.
struct Http {
    send: Send,
    runtime: tokio::runtime::Handle,
    timeout: Duration,
}

impl std::fmt::Debug for Http {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Http")
    }
}

#[tonic::async_trait]
impl HttpClient for Http {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let sent = (self.send)(request.map(http_body_util::Full::new));
        let timeout = self.timeout;
        self.runtime.spawn(async move { tokio::time::timeout(timeout, sent).await }).await??
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Variables as the environment would have them.
    fn read(option: Option<&str>, all: &[(&str, &str)]) -> Result<Settings, Error> {
        Settings::read(option, None, |name| all.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
    }

    fn endpoint(option: Option<&str>, all: &[(&str, &str)]) -> Option<(String, Protocol)> {
        read(option, all).unwrap().target.map(|t| (t.endpoint, t.protocol))
    }

    #[test]
    fn option_and_variables_name_the_collector() {
        let some = |endpoint: &str, protocol| Some((endpoint.to_owned(), protocol));
        let all = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:1/");
        let traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:2/own");
        let http = ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf");
        assert_eq!(endpoint(None, &[]), None);
        assert_eq!(endpoint(None, &[all]), some("http://all:1", Protocol::Grpc));
        assert_eq!(endpoint(None, &[all, http]), some("http://all:1/v1/traces", Protocol::Http));
        assert_eq!(endpoint(None, &[all, traces, http]), some("http://traces:2/own", Protocol::Http));
        assert_eq!(endpoint(Some("http://all:1/"), &[all, traces]), some("http://traces:2/own", Protocol::Grpc));
        assert_eq!(endpoint(Some("https://option:3"), &[all, traces]), some("https://option:3", Protocol::Grpc));
        assert_eq!(endpoint(Some("http://a:1"), &[("OTEL_SDK_DISABLED", "true")]), None);
        assert_eq!(endpoint(Some("http://a:1"), &[("OTEL_TRACES_EXPORTER", "none")]), None);
    }

    #[test]
    fn what_cannot_be_followed_is_refused_by_name() {
        let there = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:1");
        for (name, value, words) in [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317", "http:// or https://"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "grpc and http/protobuf"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "soon", "milliseconds"),
            ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/there/is/no/such", "OTEL_EXPORTER_OTLP_CERTIFICATE"),
            ("OTEL_TRACES_SAMPLER", "jaeger_remote", "traceidratio"),
        ] {
            let refused = read(None, &[(name, value), there]).err().unwrap().to_string();
            assert!(refused.contains(words) && refused.contains(value), "{refused}");
        }
        let ratio = [("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "2")];
        assert!(read(None, &ratio).err().unwrap().to_string().contains("0 to 1"));
        let file = std::env::current_exe().unwrap();
        let alone = [there, ("OTEL_EXPORTER_OTLP_CLIENT_KEY", file.to_str().unwrap())];
        assert!(read(None, &alone).err().unwrap().to_string().contains("belong together"));
    }

    #[test]
    fn samplers_decide_alike_everywhere_and_follow_who_began() {
        let of = |name, argument| Sampler::parse(name, argument).unwrap();
        let mut untold = TraceContext::random();
        untold.sampled = false;
        assert!(!of("parentbased_always_on", None).takes(&untold) && of("always_on", None).takes(&untold));
        assert!(!of("parentbased_always_off", None).begins(&untold.trace_id));
        assert!(of("parentbased_always_off", None).takes(&TraceContext::random()));
        let quarter = of("traceidratio", Some("0.25"));
        let taken = (0..4_000).filter(|_| quarter.takes(&TraceContext::random())).count();
        assert!((800..1_200).contains(&taken), "{taken} of 4000");
        assert!(!of("traceidratio", Some("0")).takes(&untold) && of("traceidratio", Some("1")).takes(&untold));
        assert!(quarter.tells_failures() && !of("always_off", None).tells_failures());
    }
}
