#![allow(clippy::unwrap_used)]
//! The store against layouts and a registry that the tests make.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::response::IntoResponse;
use serde_json::json;

use super::*;

fn tar(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, bytes) in entries {
        let mut header = tar::Header::new_gnu();
        if path.ends_with('/') {
            header.set_entry_type(tar::EntryType::Directory);
        }
        header.set_mode(0o600);
        header.set_size(bytes.len() as u64);
        // Set by hand: the builder refuses what an attacker would write.
        header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_cksum();
        builder.append(&header, *bytes).unwrap();
    }
    builder.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", sha256(bytes))
}

/// Blobs by digest, and the digest of the manifest.
struct Made {
    blobs: BTreeMap<String, Vec<u8>>,
    manifest: String,
}

fn image(layers: &[Vec<u8>]) -> Made {
    let mut blobs = BTreeMap::new();
    let mut list = Vec::new();
    for layer in layers {
        list.push(json!({"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest(layer), "size": layer.len()}));
        blobs.insert(digest(layer), layer.clone());
    }
    let manifest = serde_json::to_vec(&json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(b"{}"), "size": 2},
        "layers": list,
    }))
    .unwrap();
    let name = digest(&manifest);
    blobs.insert(name.clone(), manifest);
    Made { blobs, manifest: name }
}

fn layout(made: &Made, at: &Path) {
    std::fs::create_dir_all(at.join("blobs/sha256")).unwrap();
    for (digest, bytes) in &made.blobs {
        std::fs::write(at.join("blobs/sha256").join(digits(digest).unwrap()), bytes).unwrap();
    }
    let other = json!({"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest(b"other"), "size": 5,
        "platform": {"os": "linux", "architecture": "s390x"}});
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let mine = json!({"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": made.manifest, "size": 1,
        "platform": {"os": "linux", "architecture": architecture}});
    let index = json!({"schemaVersion": 2, "manifests": [other, mine]});
    std::fs::write(at.join("index.json"), index.to_string()).unwrap();
}

fn store(dir: &Path, local: Vec<(String, PathBuf)>, mirrors: Vec<(String, String)>) -> ImageStore {
    ImageStore::new(Options { root: dir.join("images"), local, mirrors, ..Options::default() }).unwrap()
}

fn leftovers(dir: &Path) -> Vec<PathBuf> {
    ["tmp", "unpacked", "references"]
        .iter()
        .flat_map(|f| std::fs::read_dir(dir.join("images").join(f)).unwrap())
        .map(|e| e.unwrap().path())
        .collect()
}

#[tokio::test]
async fn a_layout_is_unpacked_once_with_whiteouts() {
    let dir = tempfile::tempdir().unwrap();
    let zeros = vec![0u8; 1 << 20];
    let made = image(&[
        tar(&[("disk/", b""), ("disk/old.img", b"old"), ("gone/file", b"x"), ("opaque/below", b"x")]),
        gzip(&tar(&[("./disk/.wh.old.img", b""), ("disk/disk.img", &zeros), (".wh.gone", b"")])),
        zstd::encode_all(&tar(&[("opaque/own", b"mine"), ("opaque/.wh..wh..opq", b"")])[..], 1).unwrap(),
    ]);
    layout(&made, &dir.path().join("layout"));
    let reference = "registry.example/some/guest:1";
    let store = store(dir.path(), vec![(reference.into(), dir.path().join("layout"))], vec![]);
    assert!(matches!(store.ensure(reference, PullPolicy::Never, &[]).await, Err(ImageError::Never { .. })));
    let image = store.ensure(reference, PullPolicy::IfNotPresent, &[]).await.unwrap();
    assert_eq!(image.digest, made.manifest);
    assert_eq!(std::fs::read(image.root.join("disk/disk.img")).unwrap(), zeros);
    let meta = std::fs::metadata(image.root.join("disk/disk.img")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::blocks(&meta), 0, "zeros take no space");
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&meta) & 0o777, 0o444);
    for gone in ["disk/old.img", "gone", "opaque/below"] {
        assert!(!image.root.join(gone).exists(), "{gone}");
    }
    assert_eq!(std::fs::read(image.root.join("opaque/own")).unwrap(), b"mine");
    // What is here needs its source no more.
    std::fs::remove_dir_all(dir.path().join("layout")).unwrap();
    for policy in [PullPolicy::IfNotPresent, PullPolicy::Never] {
        assert_eq!(store.ensure(reference, policy, &[]).await.unwrap(), image);
    }
    assert!(store.ensure(reference, PullPolicy::Always, &[]).await.is_err());
    let by_digest = format!("registry.example/some/guest@{}", made.manifest);
    assert_eq!(store.ensure(&by_digest, PullPolicy::IfNotPresent, &[]).await.unwrap(), image);
}

#[tokio::test]
async fn an_archive_cannot_leave_the_image() {
    for path in ["../evil", "a/../../evil", "/../evil"] {
        let dir = tempfile::tempdir().unwrap();
        layout(&image(&[tar(&[(path, b"x")])]), &dir.path().join("layout"));
        let store = store(dir.path(), vec![("r.io/x:1".into(), dir.path().join("layout"))], vec![]);
        let error = store.ensure("r.io/x:1", PullPolicy::Always, &[]).await.unwrap_err();
        assert!(crate::pods::telling(&error).contains("leaves the image"), "{error}");
        assert_eq!(leftovers(dir.path()), Vec::<PathBuf>::new());
    }
    // A link to outside and a file through it: the link is not made, the file stays inside.
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    builder.append_link(&mut header, "out", "/tmp").unwrap();
    let mut header = tar::Header::new_gnu();
    header.set_size(1);
    builder.append_data(&mut header, "out/evil", &b"x"[..]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    layout(&image(&[builder.into_inner().unwrap()]), &dir.path().join("layout"));
    let store = store(dir.path(), vec![("r.io/x:1".into(), dir.path().join("layout"))], vec![]);
    let image = store.ensure("r.io/x:1", PullPolicy::Always, &[]).await.unwrap();
    assert!(image.root.join("out/evil").is_file() && !image.root.join("out").is_symlink());
    assert!(!Path::new("/tmp/evil").exists());
}

#[derive(Clone, Default)]
struct Registry {
    blobs: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
    tag: Arc<Mutex<String>>,
    layers_asked: Arc<AtomicUsize>,
    /// Ends the connection in the middle of a blob.
    breaks: Arc<Mutex<bool>>,
    /// Wanted credentials.
    basic: Arc<Mutex<Option<String>>>,
    /// Where tokens are given out for the wanted credentials; without one they are shown to the registry itself.
    realm: Arc<Mutex<Option<String>>>,
}

/// The token that the registry's token service gives out.
const TOKEN: &str = "a-token-of-the-test";

async fn answer(State(registry): State<Registry>, request: axum::extract::Request) -> axum::response::Response {
    use axum::http::{StatusCode, header};
    let path = request.uri().path().to_owned();
    if let Some(wanted) = registry.basic.lock().unwrap().clone() {
        let given = request.headers().get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let realm = registry.realm.lock().unwrap().clone();
        let (wanted, challenge) = match realm {
            Some(_) if path == "/token" => (wanted, "Basic realm=\"tokens\"".to_owned()),
            Some(realm) => (format!("Bearer {TOKEN}"), format!("Bearer realm=\"{realm}\",service=\"test\"")),
            None => (wanted, "Basic realm=\"test\"".to_owned()),
        };
        if given != wanted {
            let body = json!({"errors": [{"code": "UNAUTHORIZED", "message": "authentication required"}]}).to_string();
            return (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, challenge)], body).into_response();
        }
        if path == "/token" {
            assert!(request.uri().query().unwrap_or_default().contains("scope=repository"), "{}", request.uri());
            return json!({"token": TOKEN, "expires_in": 300}).to_string().into_response();
        }
    }
    let name = path.rsplit('/').next().unwrap_or_default().to_owned();
    let name = if path.contains("/manifests/") && !name.starts_with("sha256:") {
        registry.tag.lock().unwrap().clone()
    } else {
        name
    };
    if path == "/v2/" {
        return "{}".into_response();
    }
    let Some(bytes) = registry.blobs.lock().unwrap().get(&name).cloned() else {
        return StatusCode::NOT_FOUND.into_response();
    };
    if path.contains("/blobs/") {
        registry.layers_asked.fetch_add(1, Ordering::SeqCst);
        if *registry.breaks.lock().unwrap() {
            let half = bytes::Bytes::from(bytes[..bytes.len() / 2].to_vec());
            let length = bytes.len();
            // The half is on its way before the end comes.
            let cut = async {
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                Err(std::io::Error::other("cut"))
            };
            let stream = futures::StreamExt::chain(futures::stream::iter([Ok(half)]), futures::stream::once(cut));
            return ([(header::CONTENT_LENGTH, length.to_string())], axum::body::Body::from_stream(stream))
                .into_response();
        }
    }
    ([(header::CONTENT_TYPE, "application/vnd.oci.image.manifest.v1+json".to_owned())], bytes).into_response()
}

impl Registry {
    fn with(made: &Made) -> Self {
        let this = Self::default();
        *this.blobs.lock().unwrap() = made.blobs.clone();
        this.tag.lock().unwrap().clone_from(&made.manifest);
        this
    }

    /// With TLS, and a certificate that the authority in `folder` signed for localhost.
    async fn start_tls(made: &Made, folder: &Path) -> (Self, String) {
        let this = Self::with(made);
        let pki = crate::pki::Pki::open(folder).unwrap();
        let identity = pki.api_server(&[]).unwrap();
        let tls = crate::server::https::Tls {
            certificate_pem: identity.cert.into_bytes(),
            key_pem: identity.key.into_bytes(),
            client_ca_pem: pki.ca().as_bytes().to_vec(),
        };
        let acceptor = crate::server::https::acceptor(&tls).unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("localhost:{}", listener.local_addr().unwrap().port());
        let app = axum::Router::new().fallback(answer).with_state(this.clone());
        tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let (acceptor, app) = (acceptor.clone(), app.clone());
                tokio::spawn(async move {
                    // Whoever does not believe the certificate goes away.
                    let Ok(stream) = acceptor.accept(socket).await else { return };
                    let service = hyper_util::service::TowerToHyperService::new(app);
                    let builder = hyper_util::server::conn::auto::Builder::new(hyper_util::rt::TokioExecutor::new());
                    let _ = builder.serve_connection(hyper_util::rt::TokioIo::new(stream), service).await;
                });
            }
        });
        (this, address)
    }

    async fn start(made: &Made) -> (Self, String) {
        let this = Self::with(made);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let app = axum::Router::new().fallback(answer).with_state(this.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        (this, address)
    }
}

#[tokio::test]
async fn a_registry_is_asked_once_for_many_and_its_failures_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let disk: Vec<u8> = (0..3_000_000u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    let layer = gzip(&tar(&[("disk/disk.img", &disk)]));
    let made = image(std::slice::from_ref(&layer));
    let (registry, address) = Registry::start(&made).await;
    let store = store(dir.path(), vec![], vec![("quay.example".into(), address.clone())]);
    let reference = "quay.example/guests/small:1";

    *registry.breaks.lock().unwrap() = true;
    let error = store.ensure(reference, PullPolicy::IfNotPresent, &[]).await.unwrap_err();
    assert_eq!(error.reason(), "ErrImagePull");
    assert!(
        crate::pods::telling(&error).contains(&format!("layer {}", digest(&layer))),
        "{}",
        crate::pods::telling(&error)
    );
    assert_eq!(leftovers(dir.path()), Vec::<PathBuf>::new());
    *registry.breaks.lock().unwrap() = false;

    let mut wrong = layer.clone();
    let last = wrong.len() - 1;
    wrong[last] ^= 1;
    registry.blobs.lock().unwrap().insert(digest(&layer), wrong);
    let error = store.ensure(reference, PullPolicy::IfNotPresent, &[]).await.unwrap_err();
    assert_eq!(leftovers(dir.path()), Vec::<PathBuf>::new(), "{error}");
    registry.blobs.lock().unwrap().insert(digest(&layer), layer.clone());

    registry.layers_asked.store(0, Ordering::SeqCst);
    let pulls = futures::future::join_all((0..6).map(|_| store.ensure(reference, PullPolicy::IfNotPresent, &[]))).await;
    for image in pulls {
        assert_eq!(std::fs::read(image.unwrap().root.join("disk/disk.img")).unwrap(), disk);
    }
    assert_eq!(registry.layers_asked.load(Ordering::SeqCst), 1);

    // The tag moves: only Always sees it.
    let next = image(&[tar(&[("disk/disk.img", b"next")])]);
    registry.blobs.lock().unwrap().extend(next.blobs.clone());
    registry.tag.lock().unwrap().clone_from(&next.manifest);
    assert_eq!(store.ensure(reference, PullPolicy::IfNotPresent, &[]).await.unwrap().digest, made.manifest);
    assert_eq!(store.ensure(reference, PullPolicy::Always, &[]).await.unwrap().digest, next.manifest);
    let error = store
        .ensure(&format!("{address}/x@sha256:{}", "0".repeat(64)), PullPolicy::IfNotPresent, &[])
        .await
        .unwrap_err();
    assert!(matches!(error, ImageError::Registry { .. }), "{error}");
}

#[tokio::test]
async fn credentials_of_a_pull_secret_are_used() {
    let dir = tempfile::tempdir().unwrap();
    let made = image(&[tar(&[("disk/disk.img", b"x")])]);
    let (registry, address) = Registry::start(&made).await;
    *registry.basic.lock().unwrap() = Some("Basic dTpw".into());
    let store = store(dir.path(), vec![], vec![]);
    let reference = format!("{address}/private:1");
    assert!(store.ensure(&reference, PullPolicy::Always, &[]).await.is_err());
    let secret = PullSecret::parse(format!(r#"{{"auths": {{"{address}": {{"auth": "dTpw"}}}}}}"#).as_bytes()).unwrap();
    store.ensure(&reference, PullPolicy::Always, &[secret]).await.unwrap();
}

#[tokio::test]
async fn a_registry_with_tls_must_be_vouched_for_and_gives_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let made = image(&[tar(&[("disk/disk.img", b"x")])]);
    let (registry, address) = Registry::start_tls(&made, &dir.path().join("pki")).await;
    *registry.basic.lock().unwrap() = Some("Basic dTpw".into());
    *registry.realm.lock().unwrap() = Some(format!("https://{address}/token"));
    let vouched = authorities(&dir.path().join("pki/ca.crt")).unwrap();
    let _ = crate::pki::Pki::open(&dir.path().join("other")).unwrap();
    let foreign = authorities(&dir.path().join("other/ca.crt")).unwrap();
    let open = |authorities: Vec<String>| {
        let options = Options {
            root: dir.path().join("images"),
            secure: vec![address.clone()],
            authorities,
            ..Options::default()
        };
        ImageStore::new(options).unwrap()
    };
    let reference = format!("{address}/private/guest:1");
    let secret = |word: &str| {
        use base64::Engine;
        let word = base64::engine::general_purpose::STANDARD.encode(word);
        PullSecret::parse(format!(r#"{{"auths": {{"{address}": {{"auth": "{word}"}}}}}}"#).as_bytes()).unwrap()
    };
    // A certificate that nobody vouches for, and one of somebody else's authority.
    for store in [open(vec![]), open(vec![foreign])] {
        let error = store.ensure(&reference, PullPolicy::Always, &[secret("u:p")]).await.unwrap_err();
        let told = crate::pods::telling(&error);
        assert!(told.contains(&reference) && told.contains("certificate"), "{told}");
    }
    // Nobody's and somebody else's credentials. Neither are said again.
    let store = open(vec![vouched]);
    for secrets in [vec![], vec![secret("u:wrong-word")]] {
        let error = store.ensure(&reference, PullPolicy::Always, &secrets).await.unwrap_err();
        let told = crate::pods::telling(&error);
        assert!(told.contains("authentication required") && !told.contains("wrong-word"), "{told}");
    }
    assert_eq!(leftovers(dir.path()), Vec::<PathBuf>::new());
    assert_eq!(store.ensure(&reference, PullPolicy::Always, &[secret("u:p")]).await.unwrap().digest, made.manifest);
    // A file without a certificate is refused when it is named.
    std::fs::write(dir.path().join("none"), "nothing").unwrap();
    assert!(authorities(&dir.path().join("none")).unwrap_err().to_string().contains("no certificate"));
}

#[tokio::test]
async fn registries_are_reached_from_the_network_that_was_said() {
    let dir = tempfile::tempdir().unwrap();
    let netns = crate::netns::Netns::create(&format!("vt-images-{}", std::process::id())).await.unwrap();
    let made = image(&[tar(&[("disk/disk.img", b"x")])]);
    let listener = netns.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let registry = Registry::default();
    *registry.blobs.lock().unwrap() = made.blobs.clone();
    registry.tag.lock().unwrap().clone_from(&made.manifest);
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer).with_state(registry)).await });
    // By name: it is looked up on another thread, and the connection is made on a third.
    let reference = format!("localhost:{}/x:1", address.port());
    let outside = store(dir.path(), vec![], vec![]);
    let failed = outside.ensure(&reference, PullPolicy::Always, &[]).await;
    let file = Arc::new(File::open(netns.path()).unwrap());
    let options = Options { root: dir.path().join("images"), netns: Some(file), ..Options::default() };
    let inside = ImageStore::new(options).unwrap().ensure(&reference, PullPolicy::Always, &[]).await;
    netns.remove().await.unwrap();
    assert!(failed.is_err());
    assert_eq!(inside.unwrap().digest, made.manifest);
}

#[tokio::test]
async fn a_full_disk_is_said_and_cleaned_up() {
    let dir = tempfile::tempdir().unwrap();
    let noise: Vec<u8> = (0..8_000_000u32).map(|n| u8::try_from(n % 253).unwrap()).collect();
    layout(&image(&[tar(&[("disk/disk.img", &noise)])]), &dir.path().join("layout"));
    let small = dir.path().join("images");
    std::fs::create_dir(&small).unwrap();
    let flags = nix::mount::MsFlags::empty();
    nix::mount::mount(Some("tmpfs"), &small, Some("tmpfs"), flags, Some("size=2m")).unwrap();
    let error = {
        let store = store(dir.path(), vec![("r.io/x:1".into(), dir.path().join("layout"))], vec![]);
        store.ensure("r.io/x:1", PullPolicy::Always, &[]).await.unwrap_err()
    };
    let left = leftovers(dir.path());
    nix::mount::umount2(&small, nix::mount::MntFlags::MNT_DETACH).unwrap();
    assert!(crate::pods::telling(&error).to_lowercase().contains("no space left"), "{}", crate::pods::telling(&error));
    assert_eq!(left, Vec::<PathBuf>::new());
}

#[test]
fn policies_default_as_in_kubernetes() {
    assert_eq!(PullPolicy::of(None, "a"), PullPolicy::Always);
    assert_eq!(PullPolicy::of(None, "a:latest"), PullPolicy::Always);
    assert_eq!(PullPolicy::of(None, "a:1"), PullPolicy::IfNotPresent);
    assert_eq!(PullPolicy::of(Some("Never"), "a"), PullPolicy::Never);
    assert_eq!(PullPolicy::of(None, &format!("a@sha256:{}", "0".repeat(64))), PullPolicy::IfNotPresent);
}
