//! A relay between two TCP sockets. It drops what it holds whenever it is cut.

use parking_lot::Mutex;
use rustix::net::sockopt;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Forwards connections, and can keep back what their listeners answer.
pub struct Relay {
    pub at: SocketAddr,
    pub is_mute: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    pub fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (at, is_mute) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let open = Arc::new(Mutex::new(Vec::new()));
        let (all, mute) = (open.clone(), is_mute.clone());
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(target) else { continue };
                // It holds little itself.
                for socket in [&near, &far] {
                    sockopt::set_socket_recv_buffer_size(socket, 64 << 10).unwrap();
                    sockopt::set_socket_send_buffer_size(socket, 64 << 10).unwrap();
                }
                for (from, to, is_back) in [(&near, &far, false), (&far, &near, true)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let mute = mute.clone();
                    std::thread::spawn(move || {
                        let mut bytes = [0; 3000];
                        while let Ok(len @ 1..) = from.read(&mut bytes) {
                            let is_kept = is_back && mute.load(Ordering::SeqCst);
                            if !is_kept && to.write_all(&bytes[..len]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
                all.lock().extend([near, far]);
            }
        });
        Self { at, is_mute, open }
    }

    /// Ends all connections.
    pub fn cut(&self) {
        for stream in self.open.lock().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
